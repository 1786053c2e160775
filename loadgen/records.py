"""What one request became: the result record, and JSON-lines files that survive an interruption."""

import errno
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self


class Outcome(StrEnum):
    """How a request ended. Everything but OK and the two deliberate ends is an error."""

    OK = "ok"
    REFUSED = "refused"  # no connection could be made
    DROPPED = "dropped"  # the connection was closed before an answer began
    STALLED = "stalled"  # connected, then nothing arrived for the stall limit
    TIMED_OUT = "timed_out"  # still answering at the total limit
    NOT_JSON = "not_json"  # a body or a frame that is no JSON object
    MALFORMED = "malformed"  # a JSON object, but not of the form that the API says
    ERROR_FRAME = "error_frame"  # the stream carried an error object after it had begun
    EARLY_CLOSE = "early_close"  # the answer ended before its declared end
    HTTP_ERROR = "http_error"  # a status other than 2xx
    FAILED = "failed"  # none of the above; `error` has the words
    CANCELLED = "cancelled"  # this client gave up on purpose
    INTERRUPTED = "interrupted"  # the run was stopped while this request was under way


DELIBERATE = frozenset({Outcome.CANCELLED, Outcome.INTERRUPTED})
ERRORS = frozenset(Outcome) - DELIBERATE - {Outcome.OK}


@dataclass(slots=True)
class RequestRecord:
    """One request as the client saw it. Times are offsets in ms from `sent_s`, on this process's monotonic clock.

    No prompt and no output is kept here: `text` lives in memory only, for conversations.
    """

    index: int = 0
    workload: str = ""
    turn: int = 0
    warmup: bool = False
    scheduled_s: float | None = None  # seconds from the start of the run; None in a closed loop
    sent_s: float = 0.0
    late_ms: float | None = None  # handed to the socket, against the schedule
    outcome: Outcome = Outcome.OK
    error: str | None = None
    error_code: str | None = None
    status: int | None = None
    mode: str | None = None
    engine: str | None = None
    request_id: str | None = None
    ttft_ms: float | None = None
    total_ms: float = 0.0
    frame_ms: list[float] = field(default_factory=list)  # arrival of every frame that carried output
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    extras: dict[str, Any] | None = None  # the server's own object, where it was asked for
    text: str = ""
    energy_j: float | None = None  # above idle; asked for after the run, so lines get it by `rewrite_records` only

    @property
    def between_tokens_ms(self) -> float | None:
        """Mean time between tokens: right even where a frame carries several tokens."""
        if not self.frame_ms or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.frame_ms[-1] - self.frame_ms[0]) / (self.output_tokens - 1)

    @property
    def frame_gaps_ms(self) -> list[float]:
        """Times between consecutive output frames, one fewer than frames."""
        return [later - earlier for earlier, later in pairwise(self.frame_ms)]

    def to_json(self) -> str:
        """One line of JSON without the text; times to the microsecond."""
        row: dict[str, Any] = {name: getattr(self, name) for name in _WRITTEN}
        row["frame_ms"] = [round(value, 3) for value in self.frame_ms]
        return json.dumps(row, separators=(",", ":"))


_WRITTEN = tuple(item.name for item in fields(RequestRecord) if item.name != "text")


class OutputUnwritable(Exception):
    """The results folder cannot be written; the message names it and the reason."""


class LineWriter:
    """Appends lines to a file, each whole and flushed, so that a kill loses at most the last one.

    Raises OutputUnwritable when made, that is before any load is sent, and when there is no more room.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = path.open("w", encoding="utf-8")
        except OSError as error:
            raise OutputUnwritable(f"cannot write results to {path}: {error.strerror or error}") from error

    def write(self, line: str) -> None:
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            raise OutputUnwritable(f"cannot write results to {self.path}: {error.strerror or error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # what could not be written was said already
            self._file.close()


def require_writable(path: Path) -> None:
    """Makes the folder of `path`, which is written at the end of a measurement, and leaves the file as it is.

    Raises OutputUnwritable now rather than then.
    """
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        part.open("ab").close()
        part.unlink()
    except OSError as error:
        raise OutputUnwritable(f"cannot write {path}: {error.strerror or error}") from error


class RecordWriter:
    """Appends records to `<folder>/<name>`. Raises OutputUnwritable as `LineWriter` does."""

    def __init__(self, folder: Path, name: str = "requests.jsonl") -> None:
        self._lines = LineWriter(folder / name)
        self.path = self._lines.path

    def write(self, record: RequestRecord) -> None:
        self._lines.write(record.to_json())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.__exit__(kind, error, trace)


def rewrite_records(path: Path, records: Iterable[RequestRecord]) -> None:
    """Writes a file of records anew, whole or not at all. Raises OutputUnwritable."""
    with RecordWriter(path.parent, f"{path.name}.part") as writer:
        for record in records:
            writer.write(record)
    try:
        writer.path.replace(path)
    except OSError as error:
        raise OutputUnwritable(f"cannot write results to {path}: {error.strerror or error}") from error


class ReadRecords(NamedTuple):
    """Records of a file, and how many of its lines were damaged (a cut last line, after a kill)."""

    records: list[RequestRecord]
    damaged_lines: int


def read_records(path: Path) -> ReadRecords:
    """Reads a file of records back. Raises OSError when it cannot be opened."""
    records: list[RequestRecord] = []
    damaged = 0
    for row in _rows(path):
        if row is None:
            damaged += 1
        else:
            records.append(row)
    return ReadRecords(records, damaged)


def _rows(path: Path) -> Iterator[RequestRecord | None]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
                row["outcome"] = Outcome(row["outcome"])
                yield RequestRecord(**{key: value for key, value in row.items() if key in _WRITTEN})
            except (ValueError, TypeError, KeyError, AttributeError):
                yield None
