"""Requests whose joules are not all settled yet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from app.energy.activity import ActivityBatch, Labels

_FORGOTTEN_AFTER_S = 900.0
"""A preempted request may wait for minutes; one that waits longer has ended unheard."""


@dataclass(slots=True)
class _Open:
    source: str
    engine: str
    active_until_s: float
    ended: bool = False


class OpenRequests:
    """Labels and ends of requests, from the engines' batches, until the last of their joules is settled."""

    def __init__(self) -> None:
        self.labels: dict[str, Labels] = {}
        self._open: dict[str, _Open] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def take(self, batch: ActivityBatch) -> None:
        """Note who worked, until when, and who ended."""
        self.labels.update(batch.labels or {})
        for piece in batch.slices:
            for work in piece.work:
                request = self._open.get(work.request_id)
                if request is None:
                    request = self._open[work.request_id] = _Open(batch.source, batch.engine, piece.end_s)
                request.active_until_s = max(request.active_until_s, piece.end_s)
        for request_id in batch.ended:
            if request := self._open.get(request_id):
                request.ended = True

    def abandon(self, sources: Iterable[str]) -> None:
        """The engines behind these sources are gone: nothing more comes of their requests."""
        gone = set(sources)
        for request in self._open.values():
            if request.source in gone:
                request.ended = True

    def settled(self, through_s: float) -> set[str]:
        """Requests that are settled on all devices and ended, or of whose end the report must have been lost."""
        return {
            key
            for key, request in self._open.items()
            if request.active_until_s <= through_s - (0.0 if request.ended else _FORGOTTEN_AFTER_S)
        }

    def engine(self, request_id: str) -> str:
        return self._open[request_id].engine

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._open.pop(request_id, None)
            self.labels.pop(request_id, None)
