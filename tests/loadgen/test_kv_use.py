import asyncio

from aiohttp import web

from loadgen.client import OpenAIClient
from loadgen.kv_use import PRESSURE, pressure_words, pressure_words_of_each, watched_kv_use
from tests.loadgen.conftest import serve


async def test_the_highest_use_of_each_engine_is_kept() -> None:
    told = iter([{"a": 0.1, "b": 0.7}, {"a": 0.9, "b": 0.2}])
    seen = asyncio.Event()

    async def modes(request: web.Request) -> web.Response:
        uses = next(told, None)
        if uses is None:
            seen.set()
        states = [{"name": name, "kv_cache_usage": use} for name, use in (uses or {"a": 0.0}).items()]
        return web.json_response({"engines": [*states, {"name": "starting"}]})

    app = web.Application()
    app.router.add_get("/v1/modes", modes)
    server = await serve(app)
    async with OpenAIClient(str(server.make_url(""))) as client:
        async with watched_kv_use(client, every_s=0.01) as peaks:
            await seen.wait()
        assert peaks == {"a": 0.9, "b": 0.7}
    await server.close()


async def test_a_server_that_does_not_tell_is_unknown(null_url: str) -> None:
    async with OpenAIClient(null_url) as client, watched_kv_use(client) as peaks:
        await client.get_json("/v1/models")
    assert peaks == {}
    assert "unknown" in str(pressure_words(peaks))


def test_too_little_pressure_names_the_setting() -> None:
    words = pressure_words({"fp16": 0.12, "int8": 0.31})
    assert words is not None
    assert "int8, was 31 % full" in words
    assert "kv_cache_memory_bytes" in words
    assert pressure_words({"fp16": 0.12, "int8": PRESSURE}) is None


def test_each_measurement_is_to_be_short_of_memory() -> None:
    assert pressure_words_of_each({}) is None
    assert pressure_words_of_each({"fp16": PRESSURE, "int8": 1.0}) is None
    words = pressure_words_of_each({"fp16": PRESSURE, "int8": 0.31, "gptq": None})
    assert words is not None
    assert "int8 (31 %), gptq (unknown)" in words
    assert "fp16" not in words
    assert pressure_words_of_each({"fp16": None}) == pressure_words({})
