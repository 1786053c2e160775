"""Rows of the ledger, and the rule that no text of a prompt or an answer is in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

TEXT_KEYS = frozenset({"prompt", "messages", "content", "text", "completion", "output", "input", "body"})
"""Keys below which texts of users are expected: nothing is kept under them but numbers, so no mode may be named so."""
LONGEST_TEXT = 500
"""Reasons and names fit; prompts usually do not."""
_JSON_COLUMNS = ("features", "snapshot", "decision", "outcome")


class RowRefused(ValueError):
    """A record that must not be kept; the message says which part."""


class Context(NamedTuple):
    """What many decisions have in common (settings, modes, profile), written once. `content` is JSON."""

    name: str
    content: str


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What the controller knows of a request once it is over. `request_id` is unique; a second row of it is ignored.

    Where the client named its request the id is that name, a dot and something unique; it is found by the name, too.

    The four mappings are JSON; they may hold counts, hashes and names, never what a user wrote.
    """

    request_id: str
    recorded_s: float
    """Seconds since 1970."""
    mode: str | None
    engine: str | None
    tenant: str | None
    request_class: str | None
    status: str
    """`ok`, `failed`, `aborted`, `refused`, ..."""
    features: Mapping[str, Any] = field(default_factory=dict)
    snapshot: Mapping[str, Any] = field(default_factory=dict)
    decision: Mapping[str, Any] = field(default_factory=dict)
    outcome: Mapping[str, Any] = field(default_factory=dict)
    context: Context | None = None

    def columns(self) -> dict[str, Any]:
        """Column values of the table `requests`.

        Raises:
            RowRefused: it holds text of a user, or is not JSON.
        """
        row: dict[str, Any] = {
            "request_id": self.request_id,
            "recorded_s": self.recorded_s,
            "mode": self.mode,
            "engine": self.engine,
            "tenant": self.tenant,
            "class": self.request_class,
            "status": self.status,
            "context": self.context.name if self.context else None,
        }
        for name in _JSON_COLUMNS:
            value = getattr(self, name)
            _refuse_text(value, name)
            try:
                row[name] = json.dumps(value, separators=(",", ":"), allow_nan=False)
            except (TypeError, ValueError) as error:
                raise RowRefused(f"{name} is not JSON: {error}") from None
        return row


def _refuse_text(value: Any, place: str) -> None:
    if isinstance(value, str):
        if len(value) > LONGEST_TEXT:
            raise RowRefused(f"{place} is a text of {len(value)} characters; texts of users are not kept")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if str(key).lower() in TEXT_KEYS and isinstance(inner, str | list | tuple | Mapping):
                raise RowRefused(f"{place}.{key}: texts of users are not kept")
            _refuse_text(inner, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _refuse_text(inner, f"{place}[{index}]")


class IntervalRow(NamedTuple):
    """One device's account between two flushes. Wall-clock seconds but for `end_monotonic_s`."""

    start_s: float
    end_s: float
    device: str
    method: str
    scope: str
    measured_j: float
    idle_j: float | None
    credited_j: float
    residual_j: float
    approximate_j: float
    unmeasured_s: float
    idle_w: float | None
    boot: str
    end_monotonic_s: float
    end_counter_j: float | None


class CreditRow(NamedTuple):
    """Joules of one engine's mode, tenant and class on one device between two flushes."""

    end_s: float
    device: str
    engine: str
    mode: str | None
    tenant: str | None
    request_class: str | None
    energy_j: float
    idle_share_j: float
    prefill_tokens: float
    decode_tokens: float


class RequestCreditRow(NamedTuple):
    """What a request used between two flushes; its joules are the sum of its rows."""

    request_id: str
    end_s: float
    engine: str
    method: str
    scope: str
    energy_j: float
    approximate_j: float
    prefill_tokens: float
    decode_tokens: float
    final: bool


class CalibrationRow(NamedTuple):
    """What the meter has learned of a device, for the next meter to begin with."""

    at_s: float
    device: str
    idle_w: float | None
    engine_watts: Mapping[str, float]


class LastInterval(NamedTuple):
    """Where the account of a device ends."""

    end_monotonic_s: float
    end_counter_j: float | None
    boot: str
    method: str
    idle_w: float | None
