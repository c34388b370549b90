"""A request's events within its time limits, and answers put together from them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from serve_app.generation import Answer, Ending, Event, GenerationRequest, Piece, Rejected
from serve_app.openai_api.errors import ApiError, no_token_yet, timed_out
from serve_app.openai_api.responses import CompletionDetails, PromptDetails, SpeculationUsage, Usage
from serve_app.openai_api.served_model import ServedModel
from serve_app.settings import Limits

logger = logging.getLogger("ray.serve")


@dataclass(slots=True)
class Totals:
    """Counts over the answers of a request that have ended."""

    endings: dict[int, Ending] = field(default_factory=dict)

    def usage(self, choices: int) -> Usage:
        """Token counts; a prompt is counted once, however many answers it got."""
        endings = self.endings.values()
        prompt = sum(e.prompt_tokens for index, e in self.endings.items() if index % choices == 0)
        cached = sum(e.cached_tokens for index, e in self.endings.items() if index % choices == 0)
        completion = sum(e.completion_tokens for e in endings)
        steps = sum(e.decode_steps for e in endings)
        drafted, accepted = _sum([e.drafted for e in endings]), _sum([e.accepted for e in endings])
        predicted, hit = drafted.get("prediction", 0), accepted.get("prediction", 0)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptDetails(cached_tokens=cached),
            completion_tokens_details=CompletionDetails(
                accepted_prediction_tokens=hit, rejected_prediction_tokens=predicted - hit, reasoning_tokens=0
            ),
            speculation=SpeculationUsage(
                decode_steps=steps,
                retrieved_steps=sum(e.retrieved_steps for e in endings),
                mean_accepted_tokens=round(sum(e.decode_tokens for e in endings) / steps, 4) if steps else 0.0,
                drafted=drafted,
                accepted=accepted,
            ),
        )


def _sum(counts: list[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in counts:
        for source, count in part.items():
            total[source] = total.get(source, 0) + count
    return total


class Generation:
    """A running request: its pieces as they come, then its totals. Leaving the iteration cancels it."""

    def __init__(self, model: ServedModel, request: GenerationRequest, limits: Limits, request_id: str) -> None:
        self.model = model
        self.request = request
        self.totals = Totals()
        self._limits = limits
        self._id = request_id
        self._first_token: float | None = None

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """Batches of pieces; an empty one first if the request does not stream, as a sign of its first token.

        Raises:
            ApiError: the request was rejected, took too long, or the model was lost.
        """
        started = asyncio.get_running_loop().time()
        outcome = "cancelled"
        try:
            async with aclosing(self._timed(started)) as batches:
                async for batch in batches:
                    yield self._taken(batch)
            outcome = "finished"
        except ApiError as error:
            outcome = error.code or str(error.status_code)
            raise
        finally:
            self._log(outcome, asyncio.get_running_loop().time() - started)

    async def answers(self) -> list[Answer]:
        """All answers, whole. Raises ApiError as ``pieces``."""
        count = len(self.request.prompts) * self.request.choices
        answers = [Answer() for _ in range(count)]
        async with aclosing(self.pieces()) as batches:
            async for batch in batches:
                for piece in batch:
                    answers[piece.answer].add(piece)
        return answers

    def usage(self) -> Usage:
        """Token counts of the answers that have ended."""
        return self.totals.usage(self.request.choices)

    async def _timed(self, started: float) -> AsyncGenerator[list[Event], None]:
        limits = self._limits
        end = started + limits.request_timeout_s
        first = min(end, started + limits.first_token_timeout_s)
        async with aclosing(self.model.backend.generate(self.request)) as batches:
            while True:
                try:
                    async with asyncio.timeout_at(first if self._first_token is None else end):
                        batch = await anext(batches)
                except StopAsyncIteration:
                    return
                except TimeoutError as error:
                    if self._first_token is None and first < end:
                        raise no_token_yet(
                            self.model.name, limits.first_token_timeout_s, limits.retry_after_s
                        ) from error
                    raise timed_out(limits.request_timeout_s) from error
                if self._first_token is None:
                    self._first_token = asyncio.get_running_loop().time() - started
                yield batch

    def _taken(self, batch: list[Event]) -> list[Piece]:
        pieces = []
        for event in batch:
            if isinstance(event, Rejected):
                raise ApiError(400, event.message, code=event.code, param=event.param)
            if isinstance(event, Piece):
                pieces.append(event)
                if event.ending is not None:
                    self.totals.endings[event.answer] = event.ending
        return pieces

    def _log(self, outcome: str, seconds: float) -> None:
        usage = self.usage()
        fields = {
            "completion_id": self._id,
            "model": self.model.name,
            "outcome": outcome,
            "method": self.request.speculation.method,
            "stream": self.request.stream,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "mean_accepted_tokens": usage.speculation.mean_accepted_tokens,
            "first_token_s": None if self._first_token is None else round(self._first_token, 4),
            "seconds": round(seconds, 4),
        }
        logger.info(" ".join(f"{key}={value}" for key, value in fields.items()), extra=fields)
