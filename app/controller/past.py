"""What rows of the ledger tell a router that has just begun: the requests that were served before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec

from app.energy.queries import PastRow
from app.routing.classes import Shape
from app.routing.tags import Tag

_MOST = 2**53
"""More is no count, and no float is computed from it."""
_Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
_AboveZero = Annotated[int, msgspec.Meta(gt=0, le=_MOST)]


class PastRequest(NamedTuple):
    """A request that an engine got, whatever came of it."""

    age_s: float
    mode: str
    tag: Tag
    prompt_shape: Shape
    max_tokens: int | None
    sequences: int
    output_tokens: int | None
    """Of all sequences; None where it was not answered to its end, or nothing was counted."""
    accepted_tokens: int
    conversation: tuple[str, ...]
    """The hashes by which its conversation is known; none for what is no chat."""


class _Features(msgspec.Struct):
    tag: Tag
    prompt_shape: Shape
    max_tokens: _AboveZero | None = None
    sequences: _AboveZero = 1


class _Decision(msgspec.Struct):
    conversation: tuple[str, str] | None = None
    """Older rows do not have it."""


class _Usage(msgspec.Struct):
    output_tokens: _Count
    accepted_tokens: _Count


class _Outcome(msgspec.Struct):
    usage: _Usage | None = None


def read_past(rows: Sequence[PastRow], wall_s: float) -> tuple[list[PastRequest], int]:
    """The requests of the rows that can be read, in their order, and how many rows are damaged.

    `wall_s` is the present in seconds since 1970. A row from the future, as by a clock that was set back, is new.
    """
    past = []
    for row in rows:
        try:
            past.append(_read(row, wall_s))
        except msgspec.DecodeError:
            continue
    return past, len(rows) - len(past)


def _read(row: PastRow, wall_s: float) -> PastRequest:
    features = msgspec.json.decode(row.features, type=_Features)
    conversation = msgspec.json.decode(row.decision, type=_Decision).conversation
    usage = msgspec.json.decode(row.outcome, type=_Outcome).usage
    return PastRequest(
        max(0.0, wall_s - row.recorded_s),
        row.mode,
        features.tag,
        features.prompt_shape,
        features.max_tokens,
        features.sequences,
        usage.output_tokens if usage is not None and row.status == "ok" else None,
        0 if usage is None else usage.accepted_tokens,
        conversation or (),
    )
