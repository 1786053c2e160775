"""The one thread that owns a meter: it samples, and between two looks it answers what others ask.

A loop of its own costs a third of what twenty timers a second cost in an event loop, and a busy event loop cannot
delay a look.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from app.energy.meter import Meter

T = TypeVar("T")
_Call = tuple[Callable[[Meter], Any], "Future[Any]"]


class MeterStopped(RuntimeError):
    """The meter is closed, or its loop ended with an error."""


class MeterThread(threading.Thread):
    """Opens the meter and runs it until `stop`. `look` is called after every tick, in the thread."""

    def __init__(self, open_meter: Callable[[], Meter], look: Callable[[Meter], None] = lambda meter: None) -> None:
        super().__init__(name="energy-meter", daemon=True)
        self.error: BaseException | None = None
        """Why the loop ended; None while it runs, and after `stop`."""
        self._open_meter, self._look = open_meter, look
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._ended = False

    def call(self, function: Callable[[Meter], T]) -> Future[T]:
        """Have the thread call `function` with its meter; the answer or the exception is in the future."""
        future: Future[T] = Future()
        self._calls.put((function, future))
        if self._ended:
            self._refuse_waiting()
        return future

    def stop(self, within_s: float) -> None:
        """Close the meter; what was settled is written."""
        self._calls.put(None)
        self.join(within_s)

    def run(self) -> None:
        try:
            meter = self._open_meter()
            try:
                while self._answer(meter, time.monotonic() + meter.tick()):
                    self._look(meter)
            finally:
                meter.close()
        except BaseException as error:
            self.error = error
        finally:
            self._ended = True
            self._refuse_waiting()

    def _answer(self, meter: Meter, until_s: float) -> bool:
        """Answer calls until the next look is due; False when the thread shall stop."""
        while True:
            try:
                call = self._calls.get(timeout=max(until_s - time.monotonic(), 0.0))
            except queue.Empty:
                return True
            if call is None:
                return False
            function, future = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(meter))
            except BaseException as error:
                future.set_exception(error)
            if time.monotonic() >= until_s:
                return True

    def _refuse_waiting(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            if call is not None and call[1].set_running_or_notify_cancel():
                call[1].set_exception(MeterStopped(f"the energy meter stopped: {self.error or 'closed'}"))
