import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tokenizers import Tokenizer, models, pre_tokenizers

from loadgen.null_server import make_app


async def serve(app: web.Application) -> TestServer:
    server = TestServer(app)
    await server.start_server()
    return server


API_KEY = "sk-of-a-tenant"


def keyed(app: web.Application) -> web.Application:
    """The same application, open to those who send `API_KEY` only."""

    @web.middleware
    async def guard(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
        if request.headers.get("authorization") != f"Bearer {API_KEY}":
            return web.json_response({"error": {"message": "no such key", "code": "invalid_api_key"}}, status=401)
        return await handler(request)

    app.middlewares.append(guard)
    return app


@pytest.fixture
async def null_url() -> AsyncIterator[str]:
    """A null server in the test's own event loop."""
    server = await serve(make_app(stall_s=30.0))
    yield str(server.make_url("/")).rstrip("/")
    await server.close()


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that cuts at blanks and punctuation, and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}))
    return folder


async def lines_in(path: Path, wanted: int) -> None:
    """Waits until a file has that many lines; the test's time limit is the only one."""
    while not path.exists() or path.read_bytes().count(b"\n") < wanted:
        await asyncio.sleep(0.05)


async def finished(process: "subprocess.Popen[str]", timeout_s: float = 60) -> str:
    """All that a process says until its end."""
    words, _ = await asyncio.to_thread(process.communicate, None, timeout_s)
    return str(words)


def write_weights(path: Path, *tensors: tuple[str, int]) -> None:
    """A safetensors file with these tensors, of which nobody reads more than the header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in tensors:
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    content = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(content).to_bytes(8, "little") + content + bytes(end))
