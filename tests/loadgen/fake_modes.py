"""An application whose engines are as fast as they are told to be: what is measured of it is known beforehand."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Body = dict[str, Any]


@dataclass
class FakeJob:
    prompt_tokens: int
    left: int
    rewriting: bool
    begun: bool = False
    frames: asyncio.Queue[int] = field(default_factory=asyncio.Queue)


@dataclass
class FakeEngine:
    """Reads prompts one after another, then decodes all streams together; times in ms."""

    name: str
    weights: str = "fp16"
    lossless: bool = True
    modes: tuple[str, ...] = ()
    prefill_ms: tuple[float, float] = (20.0, 0.1)  # fixed, per token
    step_ms: tuple[float, float] = (12.0, 1.0)  # fixed, per stream
    slowdown: float = 1.5  # while any other engine is active
    accepted: int | None = None  # draft tokens per step where the output repeats the prompt
    joules_per_token: float | None = None
    kv_use: float | None = None
    """Of its KV cache while it has work; None is not told."""
    model: str = "tiny-model"
    """The folder of its weights."""
    generation_tokens: int = 0
    accepted_tokens: int = 0
    jobs: list[FakeJob] = field(default_factory=list)
    others: list["FakeEngine"] = field(default_factory=list)
    runs: asyncio.Task[None] | None = None

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        due = clock()
        while self.jobs:
            busy = any(other.jobs for other in self.others)
            reading = next((job for job in self.jobs if not job.begun), None)
            if reading is not None:
                took_ms = self.prefill_ms[0] + self.prefill_ms[1] * reading.prompt_tokens
            else:
                took_ms = self.step_ms[0] + self.step_ms[1] * len(self.jobs)
            due = max(due, clock() - 0.005) + took_ms / 1000 * (self.slowdown if busy else 1.0)
            await asyncio.sleep(due - clock())
            if reading is not None:
                reading.begun = True
                self.put(reading, 1)
            else:
                for job in self.jobs:
                    more = (self.accepted or 0) if job.rewriting else 0
                    tokens = min(job.left, 1 + more)
                    self.accepted_tokens += tokens - 1
                    self.put(job, tokens)
            self.jobs = [job for job in self.jobs if job.left > 0]

    def put(self, job: FakeJob, tokens: int) -> None:
        job.left -= tokens
        self.generation_tokens += tokens
        job.frames.put_nowait(tokens)

    def add(self, job: FakeJob) -> None:
        self.jobs.append(job)
        if self.runs is None or self.runs.done():
            self.runs = asyncio.create_task(self.run())

    def state(self) -> Body:
        return {
            "name": self.name,
            "state": "ready",
            "modes": list(self.modes),
            "generation_tokens": self.generation_tokens,
            "accepted_tokens": self.accepted_tokens,
            "draft_tokens": self.accepted_tokens,
            "kv_cache_usage": self.kv_use if self.kv_use is None or self.jobs else 0.0,
            "peak_memory_bytes": 1000 + len(self.name),
            "engine_args": {"max_model_len": 2048, "model": self.model},
            "env": {"OMP_NUM_THREADS": "1"},
        }


def four_engines() -> list[FakeEngine]:
    """Cheap enough for a test, slow enough that the timer's grain does not matter."""
    return [
        FakeEngine("fp16", modes=("fp16", "prefix_caching"), joules_per_token=0.5),
        FakeEngine("int8", "int8", False, ("int8",), prefill_ms=(20.0, 0.06)),
        FakeEngine("speculative", modes=("speculative",), step_ms=(14.0, 1.0), accepted=2),
    ]


@dataclass
class FakeApplication:
    engines: list[FakeEngine]
    energy: bool = False
    policies: list[str | None] = field(default_factory=list)
    fail_after: int | None = None
    ignores_policies: bool = False
    chooses: dict[str, str] = field(default_factory=dict)
    """Modes by policy; all others choose the first engine's."""
    stand_ins: dict[str, str] = field(default_factory=dict)
    """Policies that decide in place of others."""
    resets: int = 0
    told: dict[str, Body] = field(default_factory=dict)
    """Energy by request, for its record."""

    def __post_init__(self) -> None:
        for engine in self.engines:
            engine.others = [other for other in self.engines if other is not engine]

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/modes", self._modes)
        app.router.add_get("/v1/requests/{id}", self._request)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._logprobs)
        app.router.add_post("/admin/reset_prefix_cache", self._reset)
        return app

    def engine_of(self, mode: str) -> FakeEngine:
        return next(engine for engine in self.engines if mode in engine.modes)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}, {"id": "auto"}]})

    async def _modes(self, request: web.Request) -> web.Response:
        data = [
            {
                "id": mode,
                "engine": engine.name,
                "state": "ready",
                "weights": engine.weights,
                "prefix_reuse": "prefix" in mode,
                "lossless": engine.lossless,
                "engine_delta": {"speculative_config": {"method": "ngram"}} if engine.accepted is not None else {},
            }
            for engine in self.engines
            for mode in engine.modes
        ]
        engines = [engine.state() for engine in self.engines]
        return web.json_response({"model": "tiny-model", "hardware": "box", "data": data, "engines": engines})

    async def _request(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        return web.json_response({"request_id": name, "features": {"prompt_tokens": 7}, "energy": self.told.get(name)})

    async def _reset(self, request: web.Request) -> web.Response:
        self.resets += 1
        return web.json_response({})

    async def _logprobs(self, request: web.Request) -> web.Response:
        body: Body = await request.json()
        lossless = self.engine_of(body["model"].partition(":")[2]).lossless
        likely, other = (-0.1, -2.4) if lossless else (-0.11, -2.3)
        row = {"1": {"logprob": likely}, "2": {"logprob": other}}
        rows = [None] + [row] * len(body["prompt"].split())
        return web.json_response({"choices": [{"text": "a", "prompt_logprobs": rows}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        include = request.headers.get("x-modeswitch-include", "")
        if "energy" in include and not self.energy:
            return web.json_response({"error": {"message": "energy unknown", "code": "bad"}}, status=400)
        policy = None if self.ignores_policies else request.headers.get("x-modeswitch-policy")
        self.policies.append(policy)
        name = f"r{len(self.policies)}"
        if self.fail_after is not None and len(self.policies) > self.fail_after:
            return web.json_response({"error": {"message": "overloaded", "code": "overloaded"}}, status=503)
        body: Body = await request.json()
        mode = body["model"].partition(":")[2] or self.chooses.get(policy or "", (policy or "").removeprefix("static:"))
        if mode not in {name for engine in self.engines for name in engine.modes}:
            mode = self.engines[0].modes[0]
        engine = self.engine_of(mode)
        text = " ".join(message["content"] for message in body["messages"])
        job = FakeJob(len(text.split()), body["max_tokens"], "Rewrite" in text)
        extras: Body = {}
        if self.energy and engine.joules_per_token is not None:
            joules = engine.joules_per_token * (body["max_tokens"] - 1) + 0.01 * job.prompt_tokens
            energy = {"joules": joules, "method": "modelled", "scope": "box", "status": "final"}
            self.told[name] = energy
            extras = {"energy": energy} if "energy" in include else {}
        if "decision" in include and policy is not None:
            stood_in = self.stand_ins.get(policy)
            extras["decision"] = {"policy": stood_in or policy, "stands_in_for": policy if stood_in else None}
        if not body.get("stream"):
            return web.json_response({"choices": [{"message": {"content": "a"}}], "modeswitch": extras})
        headers = {"content-type": "text/event-stream", "x-modeswitch-mode": mode, "x-request-id": name}
        return await self._stream(request, body, engine, job, extras, headers)

    async def _stream(
        self,
        request: web.Request,
        body: Body,
        engine: FakeEngine,
        job: FakeJob,
        extras: Body,
        headers: dict[str, str],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        engine.add(job)
        wanted = body["max_tokens"]
        while wanted > 0:
            tokens = await job.frames.get()
            # A lossy mode's first word is another one.
            word = "w " if engine.lossless or wanted < body["max_tokens"] else "v "
            wanted -= tokens
            choice = {"index": 0, "delta": {"content": word * tokens}, "finish_reason": None}
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        usage = {"prompt_tokens": job.prompt_tokens, "completion_tokens": body["max_tokens"]}
        tail = {"choices": [], "usage": usage, "modeswitch": extras}
        await response.write(b"data: " + json.dumps(tail).encode() + b"\n\ndata: [DONE]\n\n")
        return response
