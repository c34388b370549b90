"""The FastAPI application: routes, error handlers, limits, and the OpenAPI schema."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pydantic_core
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request

from serve_app.openai_api import chat, completions
from serve_app.openai_api.errors import http_error, model_not_found, validation_error
from serve_app.openai_api.middleware import ApiKeys, BodyLimit, ErrorBoundary
from serve_app.openai_api.requests import ChatCompletionRequest, CompletionRequest
from serve_app.openai_api.responses import (
    ChatCompletion,
    Completion,
    ErrorResponse,
    Health,
    Model,
    ModelList,
    Version,
)
from serve_app.openai_api.served_model import ServedModel
from serve_app.openai_api.version import server_version
from serve_app.settings import Limits

_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse, "description": "The request is not valid."},
    401: {"model": ErrorResponse, "description": "The API key is missing or wrong."},
    404: {"model": ErrorResponse, "description": "There is no such model."},
    413: {"model": ErrorResponse, "description": "The body is too large."},
    429: {"model": ErrorResponse, "description": "Too many requests wait; see Retry-After."},
    500: {"model": ErrorResponse, "description": "The server failed."},
    503: {"model": ErrorResponse, "description": "The model cannot answer now; see Retry-After."},
    504: {"model": ErrorResponse, "description": "The request took too long."},
}
_ANY_ERROR: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorResponse, "description": "An error."}}
_EVENTS = {"text/event-stream": {"schema": {"type": "string", "description": "Chunks as server-sent events."}}}


class StrictJson(Request):
    """A request whose body is JSON as the standard has it: no NaN, no lone surrogates, no endless nesting."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            return pydantic_core.from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), body.decode(errors="replace")[:1000], 0) from error


class StrictRoute(APIRoute):
    """A route that reads its body as ``StrictJson``."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(StrictJson(request.scope, request.receive))

        return strict


def create_app(models: Sequence[ServedModel], limits: Limits, keys: frozenset[str]) -> FastAPI:
    """The application that serves ``models``; without ``keys`` no API key is asked for."""
    app = FastAPI(
        title="LogitSpec Cluster",
        version=server_version(),
        description="OpenAI-compatible API over lossless speculative decoding.",
        redirect_slashes=False,
    )
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.include_router(_router({model.name: model for model in models}, limits))
    app.add_middleware(BodyLimit, limit=limits.max_body_bytes)
    app.add_middleware(ApiKeys, keys=keys)
    app.add_middleware(ErrorBoundary)
    _name_models(app, [model.name for model in models])
    return app


def _name_models(app: FastAPI, names: list[str]) -> None:
    """Put the served models' names into the OpenAPI schema, where FastAPI keeps it once it is made."""
    schemas = app.openapi()["components"]["schemas"]
    for body in (ChatCompletionRequest, CompletionRequest):
        schemas[body.__name__]["properties"]["model"]["enum"] = names


def _router(models: dict[str, ServedModel], limits: Limits) -> APIRouter:
    router = APIRouter(route_class=StrictRoute)

    def find(name: str) -> ServedModel:
        if name not in models:
            raise model_not_found(name[:200])
        return models[name]

    @router.post("/v1/chat/completions", responses=_generating(ChatCompletion), response_model=None)
    async def create_chat_completion(body: ChatCompletionRequest) -> Response:
        """Answer a conversation."""
        return await chat.respond(find(body.model), body, limits)

    @router.post("/v1/completions", responses=_generating(Completion), response_model=None)
    async def create_completion(body: CompletionRequest) -> Response:
        """Continue a text."""
        return await completions.respond(find(body.model), body, limits)

    @router.get("/v1/models", responses=_ANY_ERROR)
    async def list_models() -> ModelList:
        """The served models."""
        return ModelList(object="list", data=[_describe(model) for model in models.values()])

    @router.get("/v1/models/{model:path}", responses=_ANY_ERROR)
    async def retrieve_model(model: str) -> Model:
        """One served model."""
        return _describe(find(model))

    @router.get("/health", responses={**_ANY_ERROR, 503: {"model": Health, "description": "No replica yet."}})
    async def health(response: Response) -> Health:
        """Whether every model has had a replica."""
        ready = {name: model.backend.is_ready() for name, model in models.items()}
        response.status_code = 200 if all(ready.values()) else 503
        return Health(status="ok" if all(ready.values()) else "starting", models=ready)

    @router.get("/version", responses=_ANY_ERROR)
    async def version() -> Version:
        """The server's version."""
        return Version(version=server_version())

    return router


def _generating(model: type) -> dict[int | str, dict[str, Any]]:
    good: dict[int | str, dict[str, Any]] = {
        200: {"model": model, "content": _EVENTS, "description": "The answer, whole or as a stream."}
    }
    return good | _ERRORS | _ANY_ERROR


def _describe(model: ServedModel) -> Model:
    return Model(id=model.name, object="model", created=model.created, owned_by="logitspec")
