"""What a target-model replica reports to Prometheus, through Ray's metrics agent."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ray.serve.metrics import Counter, Gauge, Histogram

from cluster.engine import Engine, FinishReason, StepDelta

_SECONDS = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0]
_SHORT_SECONDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0]
_TOKENS = [1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0, 32.0]


@dataclass(slots=True)
class _Mark:
    """When an answer came and when it last grew, ``perf_counter`` seconds."""

    arrived: float
    grown: float | None = None
    ended: bool = False


class ReplicaMetrics:
    """Counters, gauges and histograms of one replica. An ``Observer`` of its answers.

    Ray adds the tags deployment, replica and application to every metric, and ``ray_`` to its name.
    """

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        tags: Any = ("model",)  # Ray declares tuples of one only
        self._requests = Counter(
            "logitspec_requests", "Answers that ended, by how they ended.", (*tags, "finish_reason")
        )
        self._prompt_tokens = Counter("logitspec_prompt_tokens", "Prompt tokens of finished answers.", tags)
        self._cached_tokens = Counter("logitspec_cached_prompt_tokens", "Prompt tokens taken from the cache.", tags)
        self._emitted = Counter("logitspec_generated_tokens", "Tokens emitted.", tags)
        self._computed = Counter("logitspec_computed_tokens", "Tokens run through the model, drafts included.", tags)
        self._steps = Counter("logitspec_steps", "Forward passes of the target model.", tags)
        self._part_seconds = Counter("logitspec_step_seconds", "Time in the step loop, by part.", (*tags, "part"))
        self._drafted = Counter("logitspec_draft_tokens", "Draft tokens verified, by source.", (*tags, "source"))
        self._accepted = Counter("logitspec_accepted_tokens", "Draft tokens accepted, by source.", (*tags, "source"))
        self._retrieved = Counter(
            "logitspec_retrieved_steps", "Decode steps in which a query found a continuation.", tags
        )
        self._decoded = Counter("logitspec_decode_steps", "Decode steps of finished answers.", tags)
        self._preemptions = Counter("logitspec_preemptions", "Answers that had to give up their KV memory.", tags)
        self._running = Gauge("logitspec_running", "Answers in the running batch.", tags)
        self._waiting = Gauge("logitspec_waiting", "Answers waiting for a place in the batch.", tags)
        self._ttft = Histogram("logitspec_ttft_seconds", "From arrival to the first token.", _SECONDS, tags)
        self._itl = Histogram("logitspec_itl_seconds", "Between two pieces of an answer.", _SHORT_SECONDS, tags)
        self._duration = Histogram("logitspec_request_seconds", "From arrival to the end.", _SECONDS, tags)
        self._mat = Histogram("logitspec_mean_accepted_tokens", "Tokens a decode step, by answer.", _TOKENS, tags)
        self._tags = {"model": model}
        self._reported: dict[tuple[int | str, ...], float] = {}

    def started(self) -> _Mark:
        """See ``Observer``."""
        return _Mark(time.perf_counter())

    def advanced(self, mark: object, delta: StepDelta) -> None:
        """See ``Observer``."""
        assert isinstance(mark, _Mark)
        now = time.perf_counter()
        if mark.grown is None:
            self._ttft.observe(now - mark.arrived, self._tags)
        else:
            self._itl.observe(now - mark.grown, self._tags)
        mark.grown = now
        if delta.output is None:
            return
        output, stats = delta.output, delta.output.stats
        self._ended(output.finish_reason)
        self._duration.observe(now - mark.arrived, self._tags)
        self._prompt_tokens.inc(output.prompt_tokens, self._tags)
        _inc(self._cached_tokens, stats.cached_tokens, self._tags)
        _inc(self._retrieved, stats.retrieved_steps, self._tags)
        _inc(self._decoded, stats.decode_steps, self._tags)
        _inc(self._preemptions, stats.preemptions, self._tags)
        if stats.decode_steps:
            self._mat.observe(stats.mean_accepted_tokens, self._tags)
        mark.ended = True

    def left(self, mark: object) -> None:
        """See ``Observer``."""
        assert isinstance(mark, _Mark)
        if not mark.ended:
            self._ended(FinishReason.ABORT)

    def report(self) -> None:
        """Bring gauges and the engine's totals up to date; called once a second."""
        stats = self._engine.stats
        running, waiting = self._engine.load
        self._running.set(running, self._tags)
        self._waiting.set(waiting, self._tags)
        self._raise_to(self._emitted, stats.emitted_tokens)
        self._raise_to(self._computed, stats.computed_tokens)
        self._raise_to(self._steps, stats.steps)
        for part, seconds in stats.stopwatch.seconds.items():
            self._raise_to(self._part_seconds, seconds, part=part)
        for source, count in list(stats.drafted.items()):
            self._raise_to(self._drafted, count, source=source)
        for source, count in list(stats.accepted.items()):
            self._raise_to(self._accepted, count, source=source)

    def _ended(self, reason: FinishReason) -> None:
        self._requests.inc(1, self._tags | {"finish_reason": reason.value})

    def _raise_to(self, counter: Counter, total: float, **labels: str) -> None:
        """Bring a counter to a running total."""
        key: tuple[int | str, ...] = (id(counter), *labels.values())
        _inc(counter, total - self._reported.get(key, 0.0), self._tags | labels)
        self._reported[key] = total


def _inc(counter: Counter, amount: float, tags: dict[str, str]) -> None:
    if amount > 0:  # Ray refuses to add nothing
        counter.inc(amount, tags)
