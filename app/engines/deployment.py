"""The Serve deployment that carries one engine: its life, its requests, its health."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import math
import os
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from app.config import Settings
from app.device import Holder, leased, visible_gpu_uuid
from app.energy.activity import ActivityRecorder, Labels
from app.energy.client import ActivitySender, HandlePort
from app.engines import fork_server, health
from app.engines.activity import Activity
from app.engines.environment import UNSET, engine_environment
from app.engines.extras import extra_object
from app.engines.faults import ERROR_EVENT, INTERNAL, Fault, read_error_event
from app.engines.outbox import Outbox, Stream
from app.engines.processes import MARKER, EngineProcesses, kill_marked, start_reaper
from app.engines.starting import model_path, output_to, root_cause, vllm_args
from app.modes import EngineSpec
from app.wire import Call, ChannelMessage, EngineState, EngineStatus, Reply, Started, Usage

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from app.engines.llm import LLM

log = logging.getLogger("ray.serve")
_STATUS_EVERY_S = 0.5
_HEARTBEAT_EVERY_S = 5.0
_TELL_BUSY_EVERY_S = 0.2
_READ_MEMORY_EVERY_S = 5.0
_WAIT_FOR_ENERGY_S = 3.0
"""How long an answer waits for the last of its joules, when a client asks for them; then they are `partial`."""


class EngineUnavailable(RuntimeError):
    """The engine cannot take this request (not ready, or it died under it); another one may."""


class Engine:
    """One engine. The constructor only remembers; the engine starts in the background under the device lease.

    Serve gives up on an application whose constructors fail a few times. Here a failed start leaves the deployment
    alive in the state `failed`, with the root cause, and is tried again after a pause.
    """

    def __init__(self, spec: EngineSpec, settings: Settings, device: DeploymentHandle, meter: DeploymentHandle) -> None:
        self._spec = spec
        self._settings = settings
        self._device = device
        self._meter = meter
        self._recorder = ActivityRecorder(spec.name, process_id=os.getpid())
        self._recorder.resident = False
        self._activity = Activity(self._recorder, lambda key: self._note_first_token(key))
        self._activity_sender = ActivitySender(self._recorder, HandlePort(meter))
        self._log_path = settings.home / "logs" / f"{spec.name}.log"
        self._status = EngineStatus(spec.name, EngineState.QUEUED, os.getpid())
        self._outbox = Outbox()
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._replies: dict[str, asyncio.Task[Any]] = {}
        self._reaper: object = None
        self._llm: LLM | None = None
        self._processes: EngineProcesses | None = None
        self._memory: dict[str, Any] = {}
        self._memory_read_s = -math.inf
        self._progress: health.Progress | None = None
        # Serve constructs inside the replica's event loop.
        loop = asyncio.get_running_loop()
        self._life = loop.create_task(self._live())
        self._reporting = loop.create_task(self._activity_sender.run())

    # Life -------------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        """Start, again and again until it succeeds; then report for as long as the replica lives."""
        pause_s = self._settings.restart.first_s
        while not await self._start():
            self._set(retry_in_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._settings.restart.longest_s)
        await self._report()

    async def _start(self) -> bool:
        self._set(state=EngineState.QUEUED, reason="waiting for the device", retry_in_s=None)
        marker = uuid.uuid4().hex
        try:
            async with leased(self._device, Holder.here(self._spec.name)):
                self._set(state=EngineState.STARTING, reason=None)
                begun_s = time.monotonic()
                await self._tell_device()
                await self._load_in_time(marker)
                self._set(state=EngineState.READY, started_in_s=round(time.monotonic() - begun_s, 1))
            log.info("engine %s is ready after %.1f s", self._spec.name, self._status.started_in_s)
            return True
        except Exception as error:
            reason = str(error) or type(error).__name__
            self._set(state=EngineState.FAILED, reason=reason)
            log.error("engine %s did not start: %s", self._spec.name, reason)
            return False

    async def _load_in_time(self, marker: str) -> None:
        """Load, with nothing left behind when that fails or hangs: the next engine waits for the device."""
        limit_s = self._settings.device.lease_timeout_s
        try:
            async with self._busy_with_itself(), asyncio.timeout(limit_s):
                await self._load(marker)
        except Exception as error:
            kill_marked(marker, spare=os.getpid())
            if isinstance(error, TimeoutError):
                raise EngineUnavailable(f"it did not start within {limit_s:g} s (log: {self._log_path})") from None
            raise

    @contextlib.asynccontextmanager
    async def _busy_with_itself(self) -> AsyncIterator[None]:
        """Tell the meter that what is used meanwhile is the engine's own, no request's."""

        key = f"start-{uuid.uuid4().hex}"

        async def tell() -> None:
            since_s = time.monotonic()
            while True:
                await asyncio.sleep(_TELL_BUSY_EVERY_S)
                self._recorder.step(since_s, since_s := time.monotonic())

        # Under way like a request, so that the meter waits for what a thread that imports holds up.
        self._recorder.begin(key, Labels("none", "none", "none"))
        telling = asyncio.create_task(tell())
        try:
            yield
        finally:
            telling.cancel()
            self._recorder.end(key)

    async def _load(self, marker: str) -> None:
        path = await asyncio.to_thread(model_path, self._spec, self._settings)
        for name in UNSET:
            os.environ.pop(name, None)
        env = engine_environment(self._settings, self._spec.name)
        os.environ.update(env, **{MARKER: marker})
        self._reaper = start_reaper(marker)
        args = {"model": path, **vllm_args(self._spec, self._settings)}
        self._set(engine_args=args, env=env)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        since_byte = self._log_path.stat().st_size if self._log_path.exists() else 0
        forks = self._settings.platform == "cpu"
        with output_to(self._log_path):
            try:
                if forks:
                    fork_server.begin()
                # In a thread: importing and loading take half a minute, and Serve wants an answer meanwhile.
                llm: LLM = await asyncio.to_thread(_load_llm, args, self._settings.model.frontend, forks)
                await llm.connect(self._activity)
                effective = await llm.effective()
            except Exception as error:
                raise EngineUnavailable(root_cause(error, self._log_path, since_byte)) from error
        self._llm = llm
        self._processes = EngineProcesses(marker)
        self._set(
            process_ids=self._processes.ids,
            effective=effective,
            max_running=effective["max_num_seqs"],
            kv_capacity_tokens=effective["kv_cache_tokens"] or None,
        )
        self._recorder.resident = True
        self._recorder.resident_bytes = await self._resident_bytes(self._processes, effective)

    async def _resident_bytes(self, processes: EngineProcesses, effective: dict[str, Any]) -> int | None:
        """What the engine holds of the device's memory, which on a CPU is the host's; None where it is unknown."""
        if self._settings.platform == "cuda":
            held: int | None = effective["allocator_peak_bytes"]
            return held
        return (await asyncio.to_thread(processes.memory_bytes))[0]

    async def _tell_device(self) -> None:
        """Name the GPU in the reports. An engine whose GPU NVML cannot tell still serves; its reports name none."""
        if self._settings.platform == "cuda":
            try:
                self._recorder.devices = (await asyncio.to_thread(visible_gpu_uuid),)
            except Exception as error:
                log.warning("engine %s: NVML cannot tell its GPU: %s", self._spec.name, error)

    def _set(self, **changes: Any) -> None:
        self._status = replace(self._status, **changes)
        self._outbox.announce(self._status)

    async def _report(self) -> None:
        """Push the load while steps are taken, and a sign of life when none are."""
        assert self._llm is not None
        counters = self._llm.counters
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(counters.stepped.wait(), _HEARTBEAT_EVERY_S)
            counters.stepped.clear()
            self._set(**self._load_now())
            await asyncio.sleep(_STATUS_EVERY_S)

    def _load_now(self) -> dict[str, Any]:
        assert self._llm is not None
        counters = self._llm.counters
        # The last step's counts stay when what was left is aborted, since no further step is taken.
        busy = self._llm.has_work
        return {
            "running": counters.running if busy else 0,
            "waiting": counters.waiting if busy else 0,
            "kv_cache_usage": counters.kv_cache_usage if busy else 0.0,
            "steps": counters.steps,
            "prompt_tokens": counters.prompt_tokens,
            "generation_tokens": counters.generation_tokens,
            "prefix_queries_tokens": counters.prefix_queries_tokens,
            "prefix_hits_tokens": counters.prefix_hits_tokens,
            "draft_tokens": counters.draft_tokens,
            "accepted_tokens": self._activity.accepted_tokens,
            "preemptions": counters.preemptions,
            "step_ms": counters.step_ms,
            "accepted_per_step": self._activity.accepted_per_step if counters.draft_tokens else None,
        }

    # Requests ---------------------------------------------------------------------------------------------------

    async def start(self, call: Call) -> Reply | Started:
        """Begin a request: the whole reply, or a stream's first frames. Cancelling this aborts the request.

        A request that failed in an engine which is alive gets a reply of status 500 or above.

        Raises:
            EngineUnavailable: not ready, or died; nothing was sent, so the caller may try another engine.
        """
        if self._llm is None:
            raise EngineUnavailable(f"engine {self._spec.name} is {self._status.state}")
        self._activity.begin(call)
        if task := asyncio.current_task():
            self._replies[call.key] = task
        answer: Reply | AsyncGenerator[str, None] | None = None
        try:
            answer = await self._llm.respond(
                call, partial(self._extra, call, time.monotonic()) if call.include else None
            )
        except Exception as error:
            if self._llm.dead:
                raise EngineUnavailable(f"engine {self._spec.name} died") from error
            log.exception("engine %s: request %s failed", self._spec.name, call.key)
            answer = INTERNAL.reply()
        finally:
            self._replies.pop(call.key, None)
            usage = self._activity.end(call.key) if answer is None or isinstance(answer, Reply) else None
        if isinstance(answer, Reply):
            return replace(answer, usage=usage)
        return await self._begin_stream(call.key, answer)

    def _note_first_token(self, key: str) -> None:
        if key in self._replies:
            self._outbox.note_begun(key)

    async def _extra(self, call: Call, begun_s: float) -> dict[str, Any]:
        """The `modeswitch` object of an answer that is complete but for it."""
        usage = self._activity.finish(call.key)
        energy = None
        if "energy" in call.include:
            with contextlib.suppress(Exception):
                await self._activity_sender.flush()
                energy = (await self._meter.energy.remote(call.key, _WAIT_FOR_ENERGY_S)).as_json()
        return extra_object(call, self._spec.name, begun_s, usage, energy)

    async def _begin_stream(self, key: str, frames: AsyncGenerator[str, None]) -> Reply | Started:
        stream = Stream(key)
        self._streams[key] = asyncio.create_task(self._pump(stream, frames))
        try:
            await stream.ready.wait()
        except asyncio.CancelledError:
            self._abort(key)
            raise
        if self._llm is None or self._llm.dead or stream.lost:
            self._abort(key)
            raise EngineUnavailable(f"engine {self._spec.name}: {stream.lost or 'it died'}")
        if stream.fault is not None:
            return replace(stream.fault.reply(), usage=stream.usage)
        return self._outbox.begin(stream)

    async def _pump(self, stream: Stream, frames: AsyncGenerator[str, None]) -> None:
        """Move frames from vLLM's generator to the outbox; closing the generator aborts the request."""
        try:
            async for frame in frames:
                if frame.startswith(ERROR_EVENT):
                    self._broke(stream, read_error_event(frame))
                    return
                self._outbox.put(stream, frame)
            stream.usage = self._activity.end(stream.key)
            self._outbox.put(stream, "", last=True)
        except Exception:
            log.exception("engine %s: stream %s failed", self._spec.name, stream.key)
            self._broke(stream, INTERNAL)
        except asyncio.CancelledError:
            # Who aborts a begun stream reads it no more; `start` still waits for one that has not.
            if not stream.begun:
                self._outbox.lose(stream, "the request was aborted")
            raise
        finally:
            await frames.aclose()
            self._activity.end(stream.key)
            self._streams.pop(stream.key, None)

    def _broke(self, stream: Stream, fault: Fault) -> None:
        """A stream ended in a fault: the engine's end, if that is what it was."""
        stream.usage = self._activity.end(stream.key)
        if self._llm is None or self._llm.dead:
            self._outbox.lose(stream, f"engine {self._spec.name} died")
        else:
            self._outbox.fail(stream, fault)

    def _abort(self, key: str) -> None:
        if task := self._streams.pop(key, None) or self._replies.pop(key, None):
            task.cancel()
        self._outbox.drop(key)

    def _abort_all(self) -> None:
        for key in list(self._streams):
            self._abort(key)

    async def abort(self, key: str) -> Usage | None:
        """Stop a request that nobody waits for any more; returns what it took, None where it is not known here."""
        self._abort(key)
        return self._activity.took(key)

    async def channel(self) -> AsyncIterator[ChannelMessage]:
        """All frames and status news, for the one controller. A new call takes over; streams of the old one end."""
        self._abort_all()
        self._outbox.close()
        mine = self._outbox = Outbox()
        mine.announce(self._status)
        try:
            async for message in mine.messages():
                yield message
        finally:
            if self._outbox is mine:
                self._abort_all()

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False when the engine is not ready or the cache is in use."""
        return self._llm is not None and await self._llm.reset_prefix_cache()

    async def status(self) -> EngineStatus:
        """The status now, with memory as it was a few seconds ago at most."""
        if self._llm is None or self._processes is None:
            return self._status
        if (now_s := time.monotonic()) - self._memory_read_s >= _READ_MEMORY_EVERY_S:
            # Asked for every second, it would cost the engine: pages are counted one by one, and on a GPU the worker
            # answers between two steps.
            self._memory_read_s = now_s
            self._memory = await self._read_memory(self._llm, self._processes)
        return replace(self._status, **self._load_now(), **self._memory)

    async def _read_memory(self, llm: LLM, processes: EngineProcesses) -> dict[str, Any]:
        resident, peak = await asyncio.to_thread(processes.memory_bytes)
        if self._settings.platform == "cpu":
            return {"resident_bytes": resident, "peak_memory_bytes": peak, "memory_method": "resident_set"}
        peak = (await llm.effective())["allocator_peak_bytes"]
        return {"resident_bytes": resident, "peak_memory_bytes": peak, "memory_method": "device_allocator"}

    # Health -----------------------------------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Called by Serve; raising gets the replica replaced. An engine that never was ready is not unhealthy."""
        if self._llm is None or self._processes is None:
            return
        vitals, now_s, limits = self._processes.vitals(), time.monotonic(), self._settings.health
        self._progress = health.observe(self._progress, now_s, self._llm.counters.steps, self._llm.has_work, vitals)
        why = health.failure(self._progress, now_s, vitals, limits.stalled_after_s, limits.stuck_after_s)
        if why is None and self._llm.dead:
            why = "the engine core died"
        if why is not None:
            log.error("engine %s is replaced: %s", self._spec.name, why)
            self._set(state=EngineState.FAILED, reason=why)
            # Stopped processes do not end by being asked, and the next engine needs their memory.
            kill_marked(os.environ[MARKER], spare=os.getpid())
            raise EngineUnavailable(why)

    def __del__(self) -> None:
        if marker := os.environ.get(MARKER):
            kill_marked(marker, spare=os.getpid())


def _load_llm(args: dict[str, Any], frontend: dict[str, Any], forks: bool) -> LLM:
    # Imported here: torch and vLLM take seconds, and must find the engine's environment already set.
    module = importlib.import_module("app.engines.llm")
    if forks:
        fork_server.use()
    return module.LLM.load(args, frontend)  # type: ignore[no-any-return]
