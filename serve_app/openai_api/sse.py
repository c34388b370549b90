"""Server-sent events, as OpenAI streams them."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi.responses import StreamingResponse
from starlette.types import Send

from serve_app.openai_api.errors import ApiError, server_error

logger = logging.getLogger("ray.serve")

DONE = "data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must pass events on at once


def event(data: str) -> str:
    """One event."""
    return f"data: {data}\n\n"


class EventStream(StreamingResponse):
    """A response that is a stream of events. When the client leaves, the source is closed at once."""

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        self._events = events
        super().__init__(events, media_type="text/event-stream", headers=_HEADERS)

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._events):
            await super().stream_response(send)


async def begun(events: AsyncGenerator[str, None]) -> EventStream:
    """The response for a stream, once its first event is there; errors before that have their own status.

    Raises:
        ApiError: there is no first event.
    """
    first = await anext(events)
    return EventStream(_guarded(first, events))


async def _guarded(first: str, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """The events; an error on the way becomes the last one, since the status has been sent."""
    async with aclosing(events):
        yield first
        try:
            async for text in events:
                yield text
        except ApiError as error:
            yield event(json.dumps(error.body()))
        except Exception:
            logger.exception("a stream failed in the ingress")
            yield event(json.dumps(server_error().body()))
