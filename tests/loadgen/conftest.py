from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from loadgen.null_server import make_app


async def serve(app: web.Application) -> TestServer:
    server = TestServer(app)
    await server.start_server()
    return server


@pytest.fixture
async def null_url() -> AsyncIterator[str]:
    """A null server in the test's own event loop."""
    server = await serve(make_app(stall_s=30.0))
    yield str(server.make_url("/")).rstrip("/")
    await server.close()
