"""Errors as OpenAI's clients know them: {"error": {"message", "type", "param", "code"}} and a status."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from driver.wire import Overloaded, RequestFailed, ServiceUnavailable
from scheduler.params import InvalidRequest

logger = logging.getLogger("quadriga.http")

INVALID = "invalid_request_error"
RETRY_SECONDS = 1  # what a client is told to wait when the service has no room or is not ready
_LONGEST_VALUE = 200  # characters of a value in a message


@dataclass(slots=True, eq=False)
class ApiError(Exception):
    """An answer other than the one that was asked for. param: the field of the request that is wrong, if one is."""

    status: int
    message: str
    kind: str = INVALID
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body, self.status, self.headers)


def to_json(value: Any) -> bytes:
    # A lone surrogate, which an error may quote from a request, is no UTF-8, but its escape is JSON.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, "application/json")


def api_error(error: BaseException) -> ApiError:
    """What a caller is told of an error, whatever it is; a fault of ours goes to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        return ApiError(400, str(error))
    if isinstance(error, Overloaded):
        return ApiError(429, str(error), "rate_limit_error", "queue_full", headers=_retry())
    if isinstance(error, ServiceUnavailable):
        return ApiError(503, str(error), "service_unavailable_error", "not_ready", headers=_retry())
    if isinstance(error, RequestValidationError):
        return _of_validation(error)
    if isinstance(error, HTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return ApiError(error.status_code, str(error.detail), code=code, headers=dict(error.headers or {}))
    if isinstance(error, RequestFailed):
        return ApiError(500, str(error), "server_error", "request_failed")
    logger.error("a request has failed: %r", error, exc_info=error)
    return ApiError(500, "the server has failed to answer this; its log says why", "server_error", "internal_error")


def add_handlers(app: FastAPI) -> None:
    """Has every error of the routes answered in OpenAI's shape."""

    async def answer(request: Request, error: Exception) -> Response:
        found = api_error(error)
        if found.status == 404 and found.code == "not_found":
            found.message = f"there is no {request.url.path}"
        elif found.status == 405:
            found.message = f"{request.url.path} does not take {request.method}"
        return found.response()

    for kind in (ApiError, InvalidRequest, Overloaded, ServiceUnavailable, RequestFailed, HTTPException):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(RequestValidationError, answer)
    app.add_exception_handler(Exception, answer)


def _retry() -> dict[str, str]:
    return {"Retry-After": str(RETRY_SECONDS)}


def _of_validation(error: RequestValidationError) -> ApiError:
    """Names the first field that is wrong, with its value and what it may be."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"][1:]]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}")
    if not path:
        if first["type"] in ("missing", "model_attributes_type"):
            wanted = "the body must be a JSON object, sent with Content-Type: application/json"
            return ApiError(400, wanted)
        return ApiError(400, _plain(first["msg"]))
    if first["type"] == "missing":
        return ApiError(400, f"{'.'.join(path)} is missing", param=path[0])
    value = repr(first["input"])
    value = value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]}…"
    return ApiError(400, f"{'.'.join(path)}: {_plain(first['msg'])}, got {value}", param=path[0])


def _plain(message: str) -> str:
    return message.removeprefix("Value error, ")
