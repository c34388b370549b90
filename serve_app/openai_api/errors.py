"""Errors as OpenAI's API reports them, and turning everything that goes wrong into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(HTTPException):
    """An answer that is an error: status, message for the user, and OpenAI's ``code`` and ``param``."""

    def __init__(
        self,
        status_code: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status_code, message, headers)
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return error_body(self.status_code, self.detail, self.code, self.param)

    def response(self) -> JSONResponse:
        """The HTTP response."""
        return JSONResponse(self.body(), self.status_code, self.headers)


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """``{"error": {message, type, param, code}}``."""
    kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request asks for something that cannot be."""
    return ApiError(400, message, code=code, param=param)


def overloaded(model: str, retry_after_s: int) -> ApiError:
    """429: too many requests wait already."""
    return ApiError(
        429,
        f"Too many requests wait for the model '{model}'. Please try again later.",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(retry_after_s)},
    )


def unavailable(model: str, retry_after_s: int) -> ApiError:
    """503: no replica can answer now, or the one that did was lost."""
    return ApiError(
        503,
        f"The model '{model}' became unavailable while it answered. Please try again.",
        code="service_unavailable",
        headers={"Retry-After": str(retry_after_s)},
    )


def no_token_yet(model: str, seconds: float, retry_after_s: int) -> ApiError:
    """503: the request waited too long for its first token."""
    return ApiError(
        503,
        f"The model '{model}' had no token for this request within {seconds:g} s. Please try again later.",
        code="overloaded",
        headers={"Retry-After": str(retry_after_s)},
    )


def timed_out(seconds: float) -> ApiError:
    """504: the request took longer than any may."""
    return ApiError(
        504,
        f"The request took longer than {seconds:g} s and was ended. Ask for fewer tokens.",
        code="timeout",
    )


def server_error() -> ApiError:
    """500: our fault; the log has the details."""
    return ApiError(500, "The server had an error while processing your request.", code="internal_error")


def model_not_found(model: str) -> ApiError:
    """404 for a model that is not served."""
    return ApiError(404, f"The model '{model}' does not exist.", code="model_not_found", param="model")


def http_error(request: Request, error: Exception) -> JSONResponse:
    """Handler for HTTP errors, ours and the framework's."""
    assert isinstance(error, HTTPException)
    if not isinstance(error, ApiError):
        error = _from_framework(request, error)
    return error.response()


def _from_framework(request: Request, error: HTTPException) -> ApiError:
    path = request.url.path[:200]
    if error.status_code == 404:
        return ApiError(404, f"Unknown request URL: {request.method} {path}.", code="unknown_url")
    if error.status_code == 405:
        message = f"{path} does not take {request.method} requests."
        return ApiError(405, message, code="method_not_allowed", headers=error.headers)
    return ApiError(error.status_code, str(error.detail), headers=error.headers)


def validation_error(request: Request, error: Exception) -> JSONResponse:
    """Handler for bodies that do not fit the schema: 400, as OpenAI answers."""
    assert isinstance(error, RequestValidationError)
    return _invalid_field(error.errors(), error.body).response()


def _invalid_field(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """Of several errors, which are those of a union's members, the one that gets furthest into the body."""
    paths = [_path(error["loc"], body, missing=error["type"] == "missing") for error in errors]
    depths = [path.count(".") + path.count("[") for path in paths]
    at = depths.index(max(depths))
    error, path, kind = errors[at], paths[at], errors[at]["type"]
    if kind == "json_invalid":
        return invalid(f"The body is not valid JSON: {error['ctx']['error']}.", code="invalid_json")
    if isinstance(body, bytes):
        return invalid("Send the request as JSON, with the header Content-Type: application/json.")
    if not path:
        return invalid("The body must be a JSON object.")
    if kind == "missing":
        return invalid(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")
    if kind == "extra_forbidden":
        return invalid(f"Unrecognized request argument supplied: {path}", path, "unknown_parameter")
    return invalid(f"Invalid value for '{path}': {error['msg']}.", path, "invalid_value")


def _path(location: Sequence[int | str], body: Any, missing: bool) -> str:
    """``messages[0].content``: pydantic's location without the union members that it names."""
    path, value = "", body
    last = len(location) - 1
    for at, part in enumerate(location):
        if isinstance(value, list) and isinstance(part, int) and part < len(value):
            path, value = f"{path}[{part}]", value[part]
        elif isinstance(value, dict) and (part in value or (missing and at == last)) and isinstance(part, str):
            path, value = f"{path}.{part}" if path else part[:100], value.get(part)
    return path
