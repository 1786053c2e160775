"""The snapshot: what an engine said last, and how long ago."""

import pytest

from app.controller.live_state import take_snapshot, view
from app.routing.snapshot import Residency
from app.wire import ChannelMessage, EngineState, EngineStatus


@pytest.fixture
def link(service):
    return service.links[0]


def hear(link, monkeypatch, at_s, **status):
    """The engine says something at `at_s`."""
    monkeypatch.setattr("app.controller.links.time.monotonic", lambda: at_s)
    link._take(ChannelMessage((), EngineStatus(link.name, EngineState.READY, pid=1, **status)))
    monkeypatch.undo()


def test_a_view_is_as_old_as_what_the_engine_said_last(link, monkeypatch):
    hear(link, monkeypatch, 100.0, running=3, waiting=4)
    assert view(link, 102.5, 10).age_s == 2.5
    hear(link, monkeypatch, 107.0, running=3, waiting=4)
    assert view(link, 107.5, 10).age_s == 0.5
    assert view(link, 106.0, 10).age_s == 0.0


def test_what_a_silent_engine_said_counts_no_longer(service, link, monkeypatch):
    hear(link, monkeypatch, 100.0, running=3, waiting=4, kv_cache_usage=0.9)
    link.in_flight.send("mine", 10, 10)
    for other in service.links[1:]:
        hear(other, monkeypatch, 100.0)

    def seen(now_s):
        snapshot = take_snapshot(service.links, now_s, 10)
        found = snapshot.engines[link.name]
        return snapshot.loads()[found.engine], snapshot.kv_use(), found.healthy, found.residency

    assert seen(105.0) == (7, 0.9, True, Residency.RESIDENT)
    # Out of date, but not out of reach: the controller's own count stays.
    assert seen(110.0) == (1, 0.0, True, Residency.RESIDENT)
    link._break()
    assert seen(110.0) == (1, 0.0, False, Residency.FAILED)
