"""Running a request's answers on the engine of a replica, and merging what they emit into one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import cached_property
from typing import Protocol

from cluster.engine import AsyncEngine, FinishReason, Request, RequestError, StepDelta
from serve_app.generation import Answer, Ending, Event, GenerationRequest, Piece, Rejected, Started
from serve_app.grammar import GrammarCompiler, GrammarConstraint, GrammarError

_SEED_STEP = 0x9E3779B97F4A7C15  # far apart, so that the answers of one request share no noise
_SEED_MASK = (1 << 63) - 1


class Observer(Protocol):
    """Who is told what happens to answers, for metrics."""

    def started(self) -> object:
        """An answer has been handed to the engine; what is returned comes back with its deltas."""
        ...

    def advanced(self, mark: object, delta: StepDelta) -> None:
        """A step added ``delta`` to the answer."""
        ...

    def left(self, mark: object) -> None:
        """The answer is over, finished or not."""
        ...


class Runner:
    """Turns generation requests into engine requests."""

    def __init__(self, engine: AsyncEngine, observer: Observer) -> None:
        self._engine = engine
        self._observer = observer

    async def run(self, request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
        """Batches of events of all the request's answers; a batch is all that is there when it is asked for.

        Leaving the iteration cancels every answer.

        Raises:
            EngineStopped: the engine stops before the request is finished.
        """
        checked = self._fitted(request)
        if isinstance(checked, Rejected):
            yield [checked]
            return
        events: asyncio.Queue[Piece | Rejected | Exception] = asyncio.Queue()
        tasks = self._start(request, checked, events)
        try:
            async for batch in _as_wanted(_until_all_end(events, len(tasks)), request.stream):
                yield batch
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        loaded = self._engine.engine.loaded
        return GrammarCompiler(loaded.tokenizer, loaded.model.config.get_text_config().vocab_size, loaded.stop_ids)

    def _constraint(self, grammar: str) -> GrammarConstraint:
        return self._grammars.constraint(grammar)

    def _fitted(self, request: GenerationRequest) -> list[Request] | Rejected:
        """An engine request for each prompt, its bound filled in; or why the request does not fit."""
        engine = self._engine.engine
        fitted = []
        for prompt in request.prompts:
            room = engine.max_model_len - len(prompt)
            params = request.params
            if room < (1 if request.unbounded else params.max_new_tokens):
                asked = "" if request.unbounded else f", and the answer may take {params.max_new_tokens} more"
                return Rejected(
                    f"This model's maximum context length is {engine.max_model_len} tokens. However, the "
                    f"prompt has {len(prompt)} tokens{asked}. Please shorten it or ask for fewer tokens.",
                    "context_length_exceeded",
                    request.prompt_name,
                )
            if request.unbounded:
                held = engine.kv_rows - engine.capacity(request.speculation) - len(prompt)
                params = params.model_copy(update={"max_new_tokens": max(1, min(room, held))})
            fitted.append(Request(prompt, params, request.speculation, prediction=request.prediction))
        return fitted

    def _start(
        self,
        request: GenerationRequest,
        fitted: list[Request],
        events: asyncio.Queue[Piece | Rejected | Exception],
    ) -> list[asyncio.Task[None]]:
        """A task for each answer. A prompt's further answers wait for the first one's prefill to reuse it."""
        tasks = []
        for i, engine_request in enumerate(fitted):
            prefilled = asyncio.Event()
            for j in range(request.choices):
                seed = (engine_request.params.seed + j * _SEED_STEP) & _SEED_MASK if j else engine_request.params.seed
                params = engine_request.params.model_copy(update={"seed": seed})
                index = i * request.choices + j
                answer = replace(engine_request, params=params)
                pump = self._pump(index, answer, request.grammar, events, prefilled, leads=j == 0)
                tasks.append(asyncio.create_task(pump))
        return tasks

    async def _pump(
        self,
        index: int,
        request: Request,
        grammar: str | None,
        events: asyncio.Queue[Piece | Rejected | Exception],
        prefilled: asyncio.Event,
        leads: bool,
    ) -> None:
        if not leads:
            await prefilled.wait()
        mark = self._observer.started()
        try:
            if grammar is not None:
                request = replace(request, constraint=await asyncio.to_thread(self._constraint, grammar))
            async for delta in self._engine.stream(request):
                self._observer.advanced(mark, delta)
                prefilled.set()
                piece = self._piece(index, delta, request)
                if piece.text or piece.logprobs or piece.prompt_logprobs or piece.ending:
                    events.put_nowait(piece)
        except RequestError as error:
            events.put_nowait(Rejected(str(error)))
        except GrammarError as error:
            events.put_nowait(Rejected(f"The answer's form cannot be enforced: {error}.", param="response_format"))
        except Exception as error:  # told to whoever waits for the answer
            events.put_nowait(error)
        finally:
            self._observer.left(mark)
            prefilled.set()

    def _piece(self, index: int, delta: StepDelta, request: Request) -> Piece:
        if delta.output is None:
            return Piece(index, delta.text, delta.logprobs, None, delta.prompt_logprobs)
        logprobs, last = delta.logprobs, delta.output.token_ids[-1:]
        stop_ids = self._engine.engine.loaded.stop_ids.union(request.params.stop_token_ids)
        if logprobs and delta.output.finish_reason is FinishReason.STOP and stop_ids.issuperset(last):
            logprobs = logprobs[:-1]
        return Piece(index, delta.text, logprobs, Ending.of(delta.output), delta.prompt_logprobs)


async def _until_all_end(
    events: asyncio.Queue[Piece | Rejected | Exception], answers: int
) -> AsyncGenerator[list[Piece | Rejected], None]:
    """All that is queued, again and again, until every answer has ended or one is rejected."""
    while answers:
        taken = [await events.get()]
        while not events.empty():
            taken.append(events.get_nowait())
        batch: list[Piece | Rejected] = []
        for event in taken:
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Rejected):
                yield [event]
                return
            answers -= event.ending is not None
            batch.append(event)
        yield batch


async def _as_wanted(
    batches: AsyncGenerator[list[Piece | Rejected], None], stream: bool
) -> AsyncGenerator[list[Event], None]:
    """Batches as they come; or else a sign of the first token, then every answer in one piece."""
    answers: dict[int, Answer] = {}
    async for batch in batches:
        if stream or isinstance(batch[0], Rejected):
            yield list(batch)
            continue
        if not answers:
            yield [Started()]
        for event in batch:
            if isinstance(event, Piece):
                answers.setdefault(event.answer, Answer()).add(event)
    if answers:
        yield [Piece(i, a.text, a.logprobs or None, a.ending, a.prompt_logprobs) for i, a in sorted(answers.items())]
