"""The Ray actor around an ``Answerer``."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from pydantic import ValidationError

from cluster.engine import RequestError
from cluster.models import ModelError
from cluster.retrieval import CorpusError
from eval_jobs.benchmarks import Task
from eval_jobs.rows import Divergence, Row, Trace
from eval_jobs.sweep.answering import Answerer
from eval_jobs.sweep.settings import SweepSettings


@dataclass(frozen=True, slots=True)
class Readiness:
    """What an actor says once it has loaded: where it runs, or why it cannot."""

    node: str
    error: str | None = None


class AnswerActor:
    """Answers on one node. Made again by Ray after a crash, it is to be loaded again."""

    def __init__(self, settings: SweepSettings, methods: Sequence[str]) -> None:
        self._settings = settings
        self._methods = methods
        self._node = f"{platform.node()}/{ray.get_runtime_context().get_node_id()}"
        self._answerer: Answerer | None = None

    def load(self) -> Readiness:
        """Load the model; an error a user can mend is told, not raised."""
        try:
            self._answerer = Answerer(self._settings, self._methods)
        except (ModelError, CorpusError, RequestError, ValidationError, OSError) as error:
            return Readiness(self._node, error=str(error))
        return Readiness(self._node)

    def answer(self, tasks: Sequence[Task], method: str, repeat: int) -> list[Row]:
        """Rows of all turns."""
        rows = self._ready.answer(tasks, method, repeat)
        for row in rows:
            row.node = self._node
        return rows

    def trace(self, row: Row) -> Trace:
        """See ``Answerer.trace``."""
        return self._ready.trace(row)

    def divergence(self, row: Row, reference: Row, position: int) -> Divergence:
        """How near a tie it was where a row parts from vanilla's."""
        context = row.prompt_ids + row.output_ids[:position]
        gap = self._ready.gap(context, row.output_ids[position], reference.output_ids[position])
        return Divergence(row.bench, row.question, row.turn, row.method, row.repeat, position, gap)

    def step_ms(self) -> dict[int, float]:
        """See ``Answerer.step_ms``."""
        return self._ready.step_ms()

    @property
    def _ready(self) -> Answerer:
        assert self._answerer is not None, "load() comes first"
        return self._answerer
