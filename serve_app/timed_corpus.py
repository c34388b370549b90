"""A corpus whose lookups are timed for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray.serve.metrics import Histogram

from cluster.retrieval import CorpusLookup, LookupResult, PendingLookup

_SECONDS = [0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25]


class TimedCorpus:
    """A `CorpusLookup` in front of another; what it observes is the time that steps spend on it."""

    def __init__(self, corpus: CorpusLookup, model: str) -> None:
        tags: Any = ("model",)  # Ray declares tuples of one only
        self._corpus = corpus
        self._seconds = Histogram("logitspec_retrieval_seconds", "Time of a step's lookup.", _SECONDS, tags)
        self._tags = {"model": model}

    @property
    def sizes(self) -> tuple[int, ...]:
        """See `CorpusLookup`."""
        return self._corpus.sizes

    def lookup(
        self, queries: NDArray[np.int32], lengths: NDArray[np.int32], max_nodes: int | NDArray[np.int32]
    ) -> LookupResult:
        """See `CorpusLookup`."""
        return self.submit(queries, lengths, max_nodes).collect()

    def submit(
        self, queries: NDArray[np.int32], lengths: NDArray[np.int32], max_nodes: int | NDArray[np.int32]
    ) -> PendingLookup:
        """See `CorpusLookup`."""
        start = time.perf_counter()
        pending = self._corpus.submit(queries, lengths, max_nodes)
        return _Timed(pending, time.perf_counter() - start, self._observe)

    def _observe(self, seconds: float) -> None:
        self._seconds.observe(seconds, self._tags)


@dataclass(frozen=True, slots=True)
class _Timed:
    """A lookup on its way, which took so long to submit."""

    pending: PendingLookup
    seconds: float
    observe: Callable[[float], None]

    def collect(self) -> LookupResult:
        start = time.perf_counter()
        result = self.pending.collect()
        self.observe(self.seconds + time.perf_counter() - start)
        return result
