"""The deployment that hosts a target model: one engine a replica, requests in, events out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator

import torch

from cluster.decoding.params import SamplingParams, Speculation
from cluster.engine import AsyncEngine, Engine, Request
from cluster.models import load_model, tokenizer_fingerprint
from cluster.retrieval.client import open_corpus
from serve_app.generation import Event, GenerationRequest
from serve_app.metrics import ReplicaMetrics
from serve_app.runner import Runner
from serve_app.settings import ModelSettings
from serve_app.timed_corpus import TimedCorpus

logger = logging.getLogger("ray.serve")

_REPORT_PERIOD = 1.0  # seconds between updates of gauges and engine totals


def make_engine(settings: ModelSettings) -> Engine:
    """The engine of a replica, on its device, with its corpus.

    Raises:
        ModelError: the model cannot be loaded here.
        CorpusError: there is no such corpus, or it was built with another tokenizer.
    """
    loaded = load_model(settings.model_options())
    options = settings.retrieval_options()
    corpus = None
    if options is not None:
        found = open_corpus(options, tokenizer_fingerprint(loaded.tokenizer))
        corpus = TimedCorpus(found, settings.served_name)
    return Engine(loaded, settings.engine_options(), corpus)


def warm_up(engine: Engine, settings: ModelSettings) -> None:
    """Time steps and answer a little prompt, so that what is done on first use is done before the first request."""
    speculation = Speculation(method=settings.method, capacity=settings.capacity)
    engine.step_seconds([1])
    engine.generate([Request([0, 1, 0, 1], SamplingParams(max_new_tokens=4, ignore_eos=True), speculation)])


class TargetModel:
    """One replica of a target model."""

    def __init__(self, settings: ModelSettings) -> None:
        """Load the model and start the engine.

        Raises:
            ModelError: the model cannot be loaded here.
            CorpusError: the corpus cannot be used.
        """
        torch.set_num_threads(_threads(settings))
        engine = make_engine(settings)
        warm_up(engine, settings)
        self._engine = AsyncEngine(engine)
        self._metrics = ReplicaMetrics(engine, settings.served_name)
        self._runner = Runner(self._engine, self._metrics)
        self._reporting: asyncio.Task[None] | None = None
        loaded = engine.loaded
        logger.info(
            f"{settings.served_name} is ready on {loaded.device} in {loaded.dtype}: "
            f"context {engine.max_model_len}, KV memory {engine.kv_rows} tokens, method {settings.method}"
        )

    async def generate(self, request: GenerationRequest) -> AsyncIterator[list[Event]]:
        """Run a request; see ``Runner.run``. Cancelling the call frees its memory within a step."""
        if self._reporting is None:
            self._reporting = asyncio.create_task(self._report())
        async with contextlib.aclosing(self._runner.run(request)) as batches:
            async for batch in batches:
                yield batch

    def check_health(self) -> None:
        """Called by Serve, which replaces the replica when this raises."""
        if not self._engine.is_healthy:
            raise RuntimeError("the engine has stopped; see this replica's log for the reason")

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the constructor failed
            self._engine.close()

    async def _report(self) -> None:
        while True:
            self._metrics.report()
            await asyncio.sleep(_REPORT_PERIOD)


def _threads(settings: ModelSettings) -> int:
    """Threads of the forward pass: as many as CPUs are reserved, or all that this process may run on."""
    return max(1, round(settings.num_cpus)) if settings.num_cpus else len(os.sched_getaffinity(0))
