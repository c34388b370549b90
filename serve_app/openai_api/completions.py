"""``POST /v1/completions``."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi.responses import Response

from serve_app.generation import Answer, GenerationRequest, Piece
from serve_app.openai_api.chat import finish_reason
from serve_app.openai_api.errors import invalid
from serve_app.openai_api.events import Generation
from serve_app.openai_api.logprobs import completion_logprobs
from serve_app.openai_api.requests import CompletionRequest
from serve_app.openai_api.responses import Completion, CompletionChoice, CompletionLogprobs
from serve_app.openai_api.sampling import sampling_params, speculation
from serve_app.openai_api.served_model import ServedModel
from serve_app.openai_api.sse import DONE, begun, event
from serve_app.openai_api.version import fingerprint
from serve_app.settings import Limits

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def respond(model: ServedModel, body: CompletionRequest, limits: Limits) -> Response:
    """Answer a completion request, whole or as a stream.

    Raises:
        ApiError: it cannot be answered.
    """
    call = CompletionCall(model, body, limits)
    generation = Generation(model, await call.generation_request(), limits, call.id)
    if body.stream:
        return await begun(call.stream(generation))
    choices = [call.choice(index, answer) for index, answer in enumerate(await generation.answers())]
    completion = call.completion(choices, usage=generation.usage())
    return Response(completion.to_json(), media_type="application/json")


class CompletionCall:
    """One completion request and its answers' format."""

    def __init__(self, model: ServedModel, body: CompletionRequest, limits: Limits) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._body = body
        self._limits = limits
        self._choices = body.n or 1
        self._echoed: list[str] = []
        self._prompt_ids: list[list[int]] = []

    async def generation_request(self) -> GenerationRequest:
        """What the engine is asked.

        Raises:
            ApiError: the fields contradict each other.
        """
        body = self._body
        if body.best_of is not None and body.best_of != self._choices:
            raise invalid(f"best_of must be n ({self._choices}): all answers that are made are returned.", "best_of")
        if body.stream_options is not None and not body.stream:
            raise invalid("stream_options are for streams only.", "stream_options")
        bound = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if bound == 0 and not body.echo:
            raise invalid("max_tokens must be at least 1 unless echo is set.", "max_tokens")
        prompts = await self._prompts()
        if len(prompts) * self._choices > self._limits.max_choices:
            raise invalid(
                f"At most {self._limits.max_choices} answers (prompts times n) can be asked for at once.", "n"
            )
        return GenerationRequest(
            prompts=prompts,
            params=sampling_params(body, max(1, bound), body.logprobs, body.logprobs if body.echo else None),
            speculation=speculation(body, self._model.settings),
            choices=self._choices,
            stream=bool(body.stream),
        )

    async def _prompts(self) -> list[list[int]]:
        """Token ids of the prompts, and their texts if they are to be echoed."""
        given = self._body.prompt
        sources: list[Any] = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        if self._body.echo:
            self._echoed = [s if isinstance(s, str) else await self._model.detokenize(s) for s in sources]
        self._prompt_ids = [await self._model.tokenize(s) if isinstance(s, str) else s for s in sources]
        return self._prompt_ids

    def _prefix(self, index: int) -> str:
        return self._echoed[index // self._choices] if self._body.echo else ""

    def choice(self, index: int, answer: Answer) -> CompletionChoice:
        """One whole answer."""
        assert answer.ending is not None
        return CompletionChoice(
            index=index,
            text=self._prefix(index) + ("" if self._scores_only else answer.text),
            logprobs=self._logprobs(index, answer, 0),
            finish_reason="length" if self._scores_only else finish_reason(answer.ending),
        )

    @property
    def _scores_only(self) -> bool:
        """Whether only the prompt is wanted; the engine makes one token even so."""
        return self._body.max_tokens == 0

    def _logprobs(self, index: int, part: Answer | Piece, offset: int) -> CompletionLogprobs | None:
        """Of the prompt's tokens, if they are in this part, and of the part's own."""
        if self._body.logprobs is None:
            return None
        rows: list[tuple[int, dict[int, float] | None]] = []
        if part.prompt_logprobs is not None:
            rows += zip(self._prompt_ids[index // self._choices], part.prompt_logprobs, strict=True)
        if not self._scores_only:
            rows += [(next(iter(row)), row) for row in part.logprobs or []]
        return completion_logprobs(rows, offset, self._model.token_texts)

    async def stream(self, generation: Generation) -> AsyncGenerator[str, None]:
        """The response as events. Raises ApiError as ``Generation.pieces``."""
        options = self._body.stream_options
        with_usage = bool(options and options.include_usage)
        extra: dict[str, Any] = {"usage": None} if with_usage else {}
        shown: dict[int, int] = {}
        async with aclosing(generation.pieces()) as batches:
            async for batch in batches:
                lines = []
                for piece in batch:
                    text = "" if self._scores_only else piece.text
                    if piece.answer not in shown:
                        text = self._prefix(piece.answer) + text
                    offset = shown.get(piece.answer, 0)
                    logprobs = self._logprobs(piece.answer, piece, offset)
                    shown[piece.answer] = offset + sum(map(len, logprobs.tokens)) if logprobs else 0
                    ending = finish_reason(piece.ending) if piece.ending is not None else None
                    if ending is not None and self._scores_only:
                        ending = "length"
                    choice = CompletionChoice(index=piece.answer, text=text, logprobs=logprobs, finish_reason=ending)
                    lines.append(event(self.completion([choice], **extra).to_json()))
                yield "".join(lines)
        if with_usage:
            yield event(self.completion([], usage=generation.usage()).to_json())
        yield DONE

    def completion(self, choices: list[CompletionChoice], **extra: Any) -> Completion:
        """The response, or one event of it."""
        return Completion(
            id=self.id,
            object="text_completion",
            created=self._created,
            model=self._model.name,
            system_fingerprint=fingerprint(),
            choices=choices,
            **extra,
        )
