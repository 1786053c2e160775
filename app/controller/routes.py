"""The HTTP surface, as a Starlette application around a `Service`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.controller import accounts, overview
from app.controller.accounts import Accounts
from app.controller.body import read_request
from app.controller.errors import (
    ApiError,
    answer_api_error,
    answer_http_exception,
    answer_unexpected,
)
from app.controller.service import Answer, Service
from app.controller.streaming import ClientGone, EventStream, close, unless_gone
from app.wire import Endpoint

_CLIENT_CLOSED_REQUEST = 499
Answers = Callable[[Request], Awaitable[Response]]


def create_app(service: Service, meter: Accounts) -> Starlette:
    """The application; the service must be running in the same event loop."""
    created_s = int(time.time())

    def guarded(endpoint: Answers) -> Answers:
        """Lets in whom the API keys let in, and notes whose figures the caller may see."""

        async def guard(request: Request) -> Response:
            request.state.only_of = service.tenants.only_of(request.headers.get("authorization", ""))
            return await endpoint(request)

        return guard

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        service.refused(error)
        return await answer_api_error(request, error)

    async def list_models(_: Request) -> Response:
        return JSONResponse(overview.models(service, created_s))

    async def one_model(request: Request) -> Response:
        return JSONResponse(overview.model(service, request.path_params["name"], created_s))

    async def list_modes(request: Request) -> Response:
        return JSONResponse(await overview.modes(service, request.state.only_of))

    async def alive(_: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def ready(_: Request) -> Response:
        states = {link.name: link.state for link in service.links}
        some = any(link.ready for link in service.links)
        return JSONResponse({"status": "ready" if some else "starting", "engines": states}, 200 if some else 503)

    async def reset_prefix_cache(request: Request) -> Response:
        if request.state.only_of is not None:
            raise ApiError(403, "this needs the API key of an admin", code="admins_only")
        return JSONResponse({"reset": await service.reset_prefix_caches()})

    async def energy(request: Request) -> Response:
        return JSONResponse(await accounts.totals(meter, request.query_params, request.state.only_of))

    async def one_request(request: Request) -> Response:
        return JSONResponse(await accounts.request(meter, request.path_params["name"], request.state.only_of))

    return Starlette(
        routes=[
            Route("/v1/chat/completions", _generate(service, Endpoint.CHAT), methods=["POST"]),
            Route("/v1/completions", _generate(service, Endpoint.COMPLETION), methods=["POST"]),
            Route("/v1/models", guarded(list_models)),
            Route("/v1/models/{name:path}", guarded(one_model)),
            Route("/v1/modes", guarded(list_modes)),
            Route("/v1/energy", guarded(energy)),
            Route("/v1/requests/{name:path}", guarded(one_request)),
            Route("/health", alive),
            Route("/health/ready", ready),
            Route("/admin/reset_prefix_cache", guarded(reset_prefix_cache), methods=["POST"]),
        ],
        exception_handlers={
            ApiError: refuse,
            HTTPException: answer_http_exception,
            Exception: answer_unexpected,
        },
    )


async def _discard(answer: Answer) -> None:
    """Nobody is there any more to read it: a stream would hold its place in the engine's queue for ever."""
    if answer.frames is not None:
        await close(answer.frames)


def _generate(service: Service, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    max_body_bytes = service.settings.controller.max_body_bytes

    async def generate(request: Request) -> Response:
        incoming = await read_request(request, endpoint, max_body_bytes)
        try:
            answer = await unless_gone(request.receive, service.answer(incoming), _discard)
        except ClientGone:
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        if answer.frames is not None:
            return EventStream(answer.frames, answer.headers)
        assert answer.reply is not None
        return Response(answer.reply.body, answer.reply.status, answer.headers, media_type="application/json")

    return generate
