"""The controller's refusals, and how each becomes an answer in OpenAI's error envelope."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.openai_errors import envelope

log = logging.getLogger("ray.serve")


class ApiError(Exception):
    """A refusal with everything its answer needs. `code` is the reason a program reads; it is one of a fixed set."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A body that cannot be served."""
    return ApiError(400, message, code=code, param=param)


async def answer_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    body = envelope(error.status, error.message, error.code, error.param)
    return JSONResponse(body, error.status, headers=error.headers)


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    message, code = str(error.detail), None
    if error.status_code == 404:
        message, code = f"there is no {request.url.path}", "not_found"
    elif error.status_code == 405:
        message, code = f"{request.method} is not allowed on {request.url.path}", "method_not_allowed"
    return JSONResponse(envelope(error.status_code, message, code), error.status_code, headers=error.headers)


async def answer_unexpected(request: Request, error: Exception) -> Response:
    """A fault of ours: logged in full, told without internals."""
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse(envelope(500, "internal error; it has been logged", "internal_error"), 500)
