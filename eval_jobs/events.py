"""Server-sent events, as OpenAI-compatible endpoints stream them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


class EventError(ValueError):
    """A line that is no event."""


class EventReader:
    """Takes the bytes of a stream as they come, gives the JSON objects of its events. Lines end with line feeds only.

    Attributes:
        done: whether the stream has said that it is complete.
    """

    def __init__(self) -> None:
        self.done = False
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The events that are whole now.

        Raises:
            EventError: one of them is no JSON object.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            content = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or not content:
                continue
            if content == b"[DONE]":
                self.done = True
            else:
                yield _object(content)


def _object(content: bytes) -> dict[str, Any]:
    try:
        event = json.loads(content)
    except ValueError as error:
        raise EventError(content[:200].decode(errors="replace")) from error
    if not isinstance(event, dict):
        raise EventError(content[:200].decode(errors="replace"))
    return event
