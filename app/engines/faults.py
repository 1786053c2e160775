"""What goes wrong with one request in an engine, in OpenAI's words."""

from __future__ import annotations

import json
from typing import NamedTuple

from app.openai_errors import ENGINE_ERROR, envelope
from app.wire import Reply

ERROR_EVENT = 'data: {"error":'
"""How a frame begins with which vLLM's stream generators tell that they failed; they raise nothing."""


class Fault(NamedTuple):
    """An error before it is a reply or a frame. `status` is HTTP's."""

    status: int
    message: str
    param: str | None = None

    @property
    def code(self) -> str | None:
        """The reason that a program reads; None where vLLM's words are all there is."""
        if self.status >= 500:
            return ENGINE_ERROR
        return "context_length_exceeded" if "maximum context length" in self.message else None

    def reply(self) -> Reply:
        """The fault as a whole answer, in OpenAI's error envelope."""
        return Reply(self.status, json.dumps(envelope(self.status, self.message, self.code, self.param)).encode())


INTERNAL = Fault(500, "internal error of the engine; it has been logged")


def read_error_event(frame: str) -> Fault:
    """The fault that a frame with `ERROR_EVENT` in front tells of; `INTERNAL` for one that is not as vLLM writes it."""
    try:
        error = json.loads(frame.partition("\n")[0].removeprefix("data: "))["error"]
        status, message, param = int(error["code"]), str(error["message"]), error.get("param")
    except (ValueError, TypeError, KeyError, AttributeError):
        return INTERNAL
    return Fault(status if 400 <= status < 600 else 500, message or INTERNAL.message, param)
