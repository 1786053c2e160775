"""Server-sent events, as far as OpenAI's streaming API uses them (WHATWG HTML, section 9.2)."""

DONE = b"[DONE]"


class SseParser:
    """Cuts a byte stream into the data payloads of its events, however the network split it.

    >>> SseParser().feed(b'data: {"a": 1}\\n\\ndata: [DONE]\\n\\n')
    [b'{"a": 1}', b'[DONE]']
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """Payloads of the events that `received` completes, in order; comments and other fields are skipped."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        payloads: list[bytes] = []
        for raw in lines:
            line = raw.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                payloads.append(b"\n".join(self._data))
                self._data = []
        return payloads

    @property
    def pending(self) -> bool:
        """True when the stream stopped inside an event."""
        return bool(self._rest or self._data)
