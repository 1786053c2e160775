"""One vLLM engine and its OpenAI front end, embedded in this process (`vllm.v1.engine.async_llm.AsyncLLM`).

This is the only file that speaks vLLM's Python interface. vLLM's own classes validate the request body and write the
answer; nothing here knows OpenAI's fields.
"""

from __future__ import annotations

import asyncio
import json
import time
from argparse import Namespace
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, fields
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError
from starlette.datastructures import State
from vllm import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import BaseFrontendArgs, FrontendArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.validation import clean_loc_for_param
from vllm.tool_parsers import ToolParserManager
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from app.engines.activity import Activity
from app.engines.extras import extra_chunk
from app.engines.faults import Fault
from app.wire import Call, Endpoint, Reply

_DONE = "data: [DONE]\n\n"
_OF_ITS_SERVER = {"sse_keep_alive_interval"}
"""What vLLM's HTTP server does itself, though it is among the arguments of the front end that any server has."""
_NEWEST_STEP = 0.1
"""Weight of the newest decode step in the mean step time."""
Extra = Callable[[], Awaitable[dict[str, Any]]]
Frontend = Mapping[str, Any]


@dataclass(slots=True)
class Counters:
    """What the engine's step loop tells of itself; written by vLLM once a step, read by the deployment."""

    steps: int = 0
    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    draft_tokens: int = 0
    preemptions: int = 0
    step_ms: float | None = None
    stepped: asyncio.Event = field(default_factory=asyncio.Event)


def _counting(counters: Counters) -> type[StatLoggerBase]:
    """A vLLM stat logger class that writes into `counters`; its `record` is called once per engine step."""

    class CountSteps(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._last_s: float | None = None

        def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0):  # type: ignore[no-untyped-def]
            counters.steps += 1
            if scheduler_stats is not None:
                counters.running = scheduler_stats.num_running_reqs
                counters.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
                counters.kv_cache_usage = scheduler_stats.kv_cache_usage
                if prefix := scheduler_stats.prefix_cache_stats:
                    counters.prefix_queries_tokens += prefix.queries
                    counters.prefix_hits_tokens += prefix.hits
                if drafts := scheduler_stats.spec_decoding_stats:
                    counters.draft_tokens += drafts.num_draft_tokens
            if iteration_stats is not None:
                counters.prompt_tokens += iteration_stats.num_prompt_tokens
                counters.generation_tokens += iteration_stats.num_generation_tokens
                counters.preemptions += iteration_stats.num_preempted_reqs
            self._time_step(iteration_stats)
            counters.stepped.set()

        def _time_step(self, iteration_stats: Any) -> None:
            """Decode steps only: a prompt's step says nothing of the next token."""
            now_s = time.monotonic()
            decoded = iteration_stats is not None and iteration_stats.num_generation_tokens
            if self._last_s is not None and decoded and not iteration_stats.num_prompt_tokens:
                step_ms = (now_s - self._last_s) * 1e3
                known_ms = counters.step_ms
                counters.step_ms = step_ms if known_ms is None else known_ms + _NEWEST_STEP * (step_ms - known_ms)
            self._last_s = now_s if counters.running else None

        def log_engine_initialized(self) -> None:
            pass

    return CountSteps


class LLM:
    """A running engine. Build it with `load` in a thread, then `connect` in the event loop that will use it."""

    def __init__(self, engine: AsyncLLM, args: AsyncEngineArgs, frontend: Frontend, counters: Counters) -> None:
        self._engine = engine
        self._args = args
        self._frontend = frontend
        self._state = State()
        self.counters = counters

    @classmethod
    def load(cls, engine_args: dict[str, Any], frontend: Frontend) -> LLM:
        """Start the engine's processes and load the weights; blocks for as long as that takes.

        `frontend` are fields of vLLM's `BaseFrontendArgs`.

        Raises:
            ValueError: a field of `frontend` that would have no effect.
            Exception: whatever vLLM raises; the root cause is often only in its log.
        """
        check_frontend(frontend)
        args = AsyncEngineArgs(**engine_args)
        counters = Counters()
        engine = AsyncLLM.from_engine_args(args, stat_loggers=[_counting(counters)])
        return cls(engine, args, frontend, counters)

    async def connect(self, activity: Activity) -> None:
        """Set up vLLM's OpenAI classes."""
        activity.watch(self._engine.output_processor)
        namespace = Namespace(**{**vars(FrontendArgs()), **vars(self._args), **self._frontend})
        if namespace.tool_parser_plugin:
            ToolParserManager.import_tool_parser(namespace.tool_parser_plugin)
        tasks = await self._engine.get_supported_tasks()
        await init_app_state(self._engine, self._state, namespace, supported_tasks=tasks)

    @property
    def has_work(self) -> bool:
        return bool(self._engine.get_num_unfinished_requests())

    @property
    def dead(self) -> bool:
        return bool(self._engine.errored)

    async def respond(self, call: Call, extra: Extra | None = None) -> Reply | AsyncGenerator[str, None]:
        """Answer a request: a whole reply, or a generator of server-sent events that ends with `[DONE]`.

        `extra` makes the `modeswitch` object, once everything else of the answer is there.

        Closing the generator, or cancelling this call, aborts the request in the engine. Every fault of the request
        is a `Reply` in OpenAI's error envelope; a generator tells of one in a frame that begins with `ERROR_EVENT`.

        Raises:
            EngineDeadError: the engine died; another one may still answer.
            Exception: a fault that vLLM has no answer for, while the engine is alive.
        """
        try:
            match call.endpoint:
                case Endpoint.CHAT:
                    chat = ChatCompletionRequest.model_validate(call.body)
                    answer = await self._state.openai_serving_chat.create_chat_completion(chat)
                case Endpoint.COMPLETION:
                    completion = CompletionRequest.model_validate(call.body)
                    answer = await self._state.openai_serving_completion.create_completion(completion)
        except ValidationError as error:
            return _invalid(error)
        except EngineDeadError:
            raise
        except Exception as error:
            if self.dead:
                raise EngineDeadError from error
            fault = create_error_response(error).error
            if fault.code == HTTPStatus.INTERNAL_SERVER_ERROR:
                raise
            return Fault(fault.code, fault.message or type(error).__name__, fault.param).reply()
        if isinstance(answer, ErrorResponse):
            fault = answer.error
            if self.dead:
                raise EngineDeadError(fault.message)
            return Fault(fault.code, fault.message, param=fault.param).reply()
        if isinstance(answer, AsyncGenerator):
            return _with_extra(answer, call, extra) if extra else answer
        if extra:
            body = answer.model_dump()
            body["modeswitch"] = await extra()
            return Reply(200, json.dumps(body).encode())
        return Reply(200, answer.model_dump_json().encode())

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False while requests still use them."""
        return bool(await self._engine.reset_prefix_cache())

    async def effective(self) -> dict[str, Any]:
        """Settings read back from the running engine and its worker."""
        config = self._engine.vllm_config
        speculation = config.speculative_config
        (worker, *_) = await self._engine.collective_rpc("modeswitch_report")
        return {
            "dtype": str(config.model_config.dtype),
            "quantization": config.model_config.quantization,
            "enforce_eager": config.model_config.enforce_eager,
            "compilation_mode": str(config.compilation_config.mode),
            "enable_prefix_caching": config.cache_config.enable_prefix_caching,
            "cache_dtype": config.cache_config.cache_dtype,
            "block_size": config.cache_config.block_size,
            "kv_cache_tokens": (config.cache_config.num_gpu_blocks or 0) * config.cache_config.block_size,
            "enable_chunked_prefill": config.scheduler_config.enable_chunked_prefill,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "speculation": speculation and {"method": speculation.method, "tokens": speculation.num_speculative_tokens},
            **worker,
        }

    def shutdown(self) -> None:
        """End the engine's processes."""
        self._engine.shutdown(timeout=5.0)


def check_frontend(frontend: Frontend) -> None:
    """
    Raises:
        ValueError: a field is unknown, or of vLLM's HTTP server, which is not used here: it would be ignored.
    """
    known = {field.name for field in fields(BaseFrontendArgs)} - _OF_ITS_SERVER
    if ignored := frontend.keys() - known:
        raise ValueError(f"model.frontend: {', '.join(sorted(ignored))} would have no effect")


def _invalid(error: ValidationError) -> Reply:
    """The first fault pydantic found, named by its place in the body."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = clean_loc_for_param(first["loc"])
    message = f"{place}: {first['msg']}" if place else str(first["msg"])
    return Fault(400, message, param=place or None).reply()


async def _with_extra(frames: AsyncGenerator[str, None], call: Call, extra: Extra) -> AsyncGenerator[str, None]:
    """The same frames, with one more before `[DONE]`."""
    try:
        async for frame in frames:
            if frame == _DONE:
                yield extra_chunk(call, await extra())
            yield frame
    finally:
        await frames.aclose()
