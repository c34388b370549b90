"""What every request passes before the application: errors caught, keys checked, bodies bounded."""

from __future__ import annotations

import hmac
import logging

from ray.exceptions import TaskCancelledError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.openai_api.errors import ApiError, server_error

logger = logging.getLogger("ray.serve")


class ErrorBoundary:
    """No exception leaves the application: it is logged, and the client gets an error object."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        async def followed() -> Message:
            try:
                return await receive()
            except TaskCancelledError:  # Serve's word, at times, for a client that has left
                return {"type": "http.disconnect"}

        try:
            await self._app(scope, followed, watched)
        except Exception:
            if scope["type"] != "http":
                raise
            logger.exception("a request failed in the ingress")
            if not started:
                await server_error().response()(scope, receive, send)


class ApiKeys:
    """Asks for one of the keys, as ``Authorization: Bearer …``, on all paths under /v1."""

    def __init__(self, app: ASGIApp, keys: frozenset[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys and scope["type"] == "http" and _is_guarded(scope["path"]):
            problem = self._problem(Headers(scope=scope).get("authorization", ""))
            if problem is not None:
                await problem.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _problem(self, header: str) -> ApiError | None:
        scheme, _, key = header.partition(" ")
        headers = {"WWW-Authenticate": "Bearer"}
        if scheme.lower() != "bearer" or not key.strip():
            message = "You didn't provide an API key. Send it in a header: Authorization: Bearer KEY."
            return ApiError(401, message, code="missing_api_key", headers=headers)
        given = key.strip().encode()
        matches = [hmac.compare_digest(given, known) for known in self._keys]  # all: time tells nothing
        if not any(matches):
            return ApiError(401, "Incorrect API key provided.", code="invalid_api_key", headers=headers)
        return None


def _is_guarded(path: str) -> bool:
    return path == "/v1" or path.startswith("/v1/")


class BodyLimit:
    """Answers 413 to larger bodies, by their declared size or as they come in."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > self._limit):
            await self._too_large().response()(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._limit:
                    raise self._too_large()
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> ApiError:
        message = f"The request body is larger than {self._limit} bytes. Please send less text."
        return ApiError(413, message, code="request_too_large")
