"""One request to an OpenAI-compatible endpoint, streamed, and what became of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from eval_jobs.events import EventError, EventReader


@dataclass(slots=True)
class Outcome:
    """What became of one request; times in seconds.

    Attributes:
        began: when it was sent, since the first one was.
        seconds: from sending it to its end, whatever the end.
        ttft: from sending it to the first piece of text; None if there was none.
        gaps: between the pieces; a piece may hold several tokens.
        tokens: of the answer, as the endpoint counts them, or its pieces where it does not.
        error: the kind of failure; None for an answer in full.
        detail: the failure in the endpoint's words.
    """

    began: float = 0.0
    seconds: float = 0.0
    ttft: float | None = None
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    error: str | None = None
    detail: str = ""

    @property
    def seconds_a_token(self) -> float | None:
        """Time a token after the first piece; None for answers of one token."""
        return sum(self.gaps) / (self.tokens - 1) if self.tokens > 1 else None


class RequestFailed(Exception):
    """A request without a full answer: kind, and the endpoint's words."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class LoadClient:
    """Asks one model of an endpoint, over as many connections as there are requests under way."""

    def __init__(self, base_url: str, timeout_s: float, api_key: str | None, fields: Mapping[str, Any]) -> None:
        """``fields`` are those of every request: model, max_tokens and so on."""
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._timeout = timeout_s
        self._fields = {"stream": True, "stream_options": {"include_usage": True}, **fields}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(headers=headers, timeout=timeout_s, limits=limits, trust_env=False)

    async def __aenter__(self) -> LoadClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, prompt: str, **fields: Any) -> Outcome:
        """Send a prompt and read its answer to the end; failures are outcomes as well."""
        outcome = Outcome()
        start = time.perf_counter()
        body = {**self._fields, "messages": [{"role": "user", "content": prompt}], **fields}
        try:
            async with asyncio.timeout(self._timeout):
                await self._read(body, outcome, start)
        except RequestFailed as failure:
            outcome.error, outcome.detail = failure.kind, str(failure)
        except EventError as error:
            outcome.error, outcome.detail = "not an event", str(error)
        except (AttributeError, TypeError, ValueError, KeyError) as error:  # events that are none of this API
            outcome.error, outcome.detail = "not an event", repr(error)
        except (TimeoutError, httpx.TimeoutException):
            outcome.error, outcome.detail = "timeout", f"no end within {self._timeout:g} s"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            outcome.error, outcome.detail = "connection", str(error) or type(error).__name__
        outcome.seconds = time.perf_counter() - start
        return outcome

    async def _read(self, body: dict[str, Any], outcome: Outcome, start: float) -> None:
        last = start
        pieces = 0
        finished = False
        async with self._http.stream("POST", self._url, json=body) as response:
            if response.status_code != 200:
                raise RequestFailed(f"http {response.status_code}", await _message(response))
            async for event in _events(response):
                if "error" in event:
                    raise RequestFailed("stream error", _error_text(event["error"]))
                for choice in event.get("choices") or ():
                    text = (choice.get("delta") or {}).get("content")
                    finished = finished or choice.get("finish_reason") is not None
                    if text:
                        now = time.perf_counter()
                        if outcome.ttft is None:
                            outcome.ttft = now - start
                        else:
                            outcome.gaps.append(now - last)
                        last = now
                        pieces += 1
                        outcome.text += text
                _count(event.get("usage") or {}, outcome)
        outcome.tokens = outcome.tokens or pieces
        if not finished:
            raise RequestFailed("cut off", "the stream ended before the answer did")


def _count(usage: dict[str, Any], outcome: Outcome) -> None:
    if usage:
        outcome.tokens = usage.get("completion_tokens") or 0
        outcome.prompt_tokens = usage.get("prompt_tokens") or 0
        outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream, up to ``[DONE]``."""
    reader = EventReader()
    async for data in response.aiter_bytes():
        for event in reader.feed(data):
            yield event
        if reader.done:
            return


async def _message(response: httpx.Response) -> str:
    """An error response in one line."""
    text = (await response.aread()).decode(errors="replace")
    try:
        return _error_text(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split())[:200]


def _error_text(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
