"""Modes that read every text well; what breaks only in their own answers is told."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from loadgen.client import OpenAIClient
from tests.loadgen.conftest import serve

RIGHT, WRONG = {"token_id:1": -0.1, "token_id:2": -2.4}, {"token_id:1": -3.0, "token_id:2": -0.06}


@dataclass
class CachingApplication:
    """corrupts: modes that answer wrong once the prompt comes from the cache. strays: modes that always do.

    max_logprobs: refused above, as vLLM does. drafts: tokens proposed for each answer of a mode that speculates.
    """

    corrupts: frozenset[str] = frozenset()
    strays: frozenset[str] = frozenset()
    caches: bool = True
    max_logprobs: int = 100
    drafts: int = 5
    hits: int = 0
    drafted: int = 0
    seen: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)

    def overview(self) -> dict[str, Any]:
        def mode(name: str, engine: str, **more: Any) -> dict[str, Any]:
            return {"id": name, "engine": engine, "state": "ready", "weights": "int8", "lossless": False, **more}

        return {
            "model": "m",
            "hardware": "h",
            "data": [
                mode("fp16", "fp16", lossless=True),
                mode("int8", "int8"),
                mode("int8_batched", "int8"),
                mode("int8_prefix_caching", "int8", prefix_reuse=True),
                mode("fp8_kv", "fp8_kv", engine_delta={"kv_cache_dtype": "fp8"}),
                mode("int8_speculative", "int8_speculative", engine_delta={"speculative_config": {"method": "ngram"}}),
            ],
            "engines": [
                {"name": name, "prefix_hits_tokens": self.hits, "draft_tokens": self.drafted}
                for name in ("fp16", "int8", "fp8_kv", "int8_speculative")
            ],
        }

    async def modes(self, request: web.Request) -> web.Response:
        return web.json_response(self.overview())

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        mode, words = body["model"].partition(":")[2], body["prompt"].split()
        asked = body.get("prompt_logprobs", body.get("logprobs", 0))
        if asked > self.max_logprobs:
            message = f"Requested prompt logprobs of {asked}, which is greater than max allowed: {self.max_logprobs}"
            return web.json_response({"error": {"message": message}}, status=400)
        if "prompt_logprobs" in body:
            row = {"1": {"logprob": -0.1}, "2": {"logprob": -2.4}}
            return web.json_response({"choices": [{"prompt_logprobs": [None] + [row] * len(words)}]})
        self.asked.append(mode)
        reuses = self.caches and "prefix" in mode
        hit = reuses and body["prompt"] in self.seen
        if reuses:
            self.seen.add(body["prompt"])
            self.hits += len(words) - 1 if hit else 0
        if "speculative" in mode:
            self.drafted += self.drafts
        top = WRONG if mode in self.strays or (hit and mode in self.corrupts) else RIGHT
        count = body["max_tokens"]
        logprobs = {"tokens": [max(top, key=top.__getitem__)] * count, "top_logprobs": [top] * count}
        return web.json_response({"choices": [{"logprobs": logprobs}], "usage": {"prompt_tokens": len(words)}})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/modes", self.modes)
        app.router.add_post("/v1/completions", self.complete)
        return app


@asynccontextmanager
async def client_of(application: CachingApplication) -> AsyncIterator[OpenAIClient]:
    server = await serve(application.app())
    async with OpenAIClient(str(server.make_url(""))) as client:
        yield client
    await server.close()
