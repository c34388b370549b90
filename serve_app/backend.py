"""How the ingress reaches a target model, and what becomes of failures on the way."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from grpc import RpcError
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from cluster.engine import EngineStopped
from serve_app.generation import Event, GenerationRequest
from serve_app.openai_api.errors import ApiError, overloaded, server_error, unavailable

logger = logging.getLogger("ray.serve")

_LIGHT_BYTES = 2**20  # of a message; gRPC refuses those beyond 4 MiB


class Backend(Protocol):
    """A target model as the ingress sees it."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
        """Batches of events, as ``Runner.run`` makes them; leaving the iteration cancels the request.

        Raises:
            ApiError: the model cannot be reached or gave up.
        """
        ...

    def is_ready(self) -> bool:
        """Whether a replica has been up; requests wait for one otherwise."""
        ...


class ReplicaBackend:
    """A target model behind a Serve deployment handle."""

    def __init__(self, name: str, handle: DeploymentHandle, retry_after_s: int) -> None:
        self._name = name
        self._handle: Any = handle.options(method_name="generate", stream=True)
        self._direct: Any = self._handle.options(_by_reference=False)
        self._retry_after = retry_after_s

    def is_ready(self) -> bool:
        """See ``Backend``."""
        return bool(self._handle.running_replicas_populated())

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
        """See ``Backend``."""
        response = (self._direct if _is_light(request) else self._handle).remote(request)
        try:
            async for batch in response:
                yield batch
        except (asyncio.CancelledError, GeneratorExit):
            with contextlib.suppress(Exception):  # a request that has failed meanwhile raises its error again
                response.cancel()
            raise
        except BackPressureError as error:
            raise overloaded(self._name, self._retry_after) from error
        except (RayError, RpcError, DeploymentUnavailableError, EngineStopped) as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> ApiError:
        """The client is told what to do, the log gets the reason."""
        lost = isinstance(error, (RayActorError, RpcError, DeploymentUnavailableError, EngineStopped))
        if lost and not isinstance(error, RayTaskError):
            logger.warning(f"lost a replica of {self._name}: {_first_line(error)}")
            return unavailable(self._name, self._retry_after)
        logger.error(f"a replica of {self._name} failed: {error}")
        return unavailable(self._name, self._retry_after) if lost else server_error()


def _is_light(request: GenerationRequest) -> bool:
    """Whether request and events may go from process to process, which costs half of going through the object store.

    Whole answers and the scores of prompts may be large, and are only one event.
    """
    scores = request.params.prompt_logprobs is not None
    return request.stream and not scores and len(pickle.dumps(request)) <= _LIGHT_BYTES


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
