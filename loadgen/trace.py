"""Request traces as Mooncake publishes them.

JSON lines of `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOONCAKE_BLOCK_TOKENS = 512


class TraceError(Exception):
    """A trace that cannot be replayed; the message names the file, the line and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace. `hash_ids` names the prompt's blocks of 512 tokens: equal ids are equal text."""

    time_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, *, limit: int | None = None) -> list[TraceRow]:
    """Rows in file order, which must be order of time. Raises TraceError at the first line that is wrong."""
    rows: list[TraceRow] = []
    for number, line in _numbered_lines(path):
        try:
            row = _row(json.loads(line))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
            raise TraceError(f"{path}, line {number}: {reason}") from error
        if rows and row.time_s < rows[-1].time_s:
            raise TraceError(
                f"{path}, line {number}: timestamp {row.time_s * 1000:g} ms is before the line above it "
                f"({rows[-1].time_s * 1000:g} ms); sort the trace by timestamp"
            )
        rows.append(row)
        if limit is not None and len(rows) >= limit:
            break
    if not rows:
        raise TraceError(f"{path}: no requests in it")
    return rows


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as lines:
            yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read the trace {path}: {error}") from error


def _row(value: Any) -> TraceRow:
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    time_s = float(value["timestamp"]) / 1000
    if not 0 <= time_s < float("inf"):
        raise ValueError(f"timestamp {value['timestamp']} is not a time at or after 0")
    input_tokens, output_tokens = int(value["input_length"]), int(value["output_length"])
    if input_tokens < 1 or output_tokens < 1:
        raise ValueError(f"input_length {input_tokens} and output_length {output_tokens} must be at least 1")
    return TraceRow(time_s, input_tokens, output_tokens, tuple(int(item) for item in value.get("hash_ids") or ()))
