"""Where a step's time goes, and totals over all requests."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from cluster.decoding.tree import SOURCES

PARTS = ("draft", "mask", "forward", "verify", "compact", "other")


class Stopwatch:
    """Splits the time of a step loop into named parts, without gaps; ``mark`` is the last ``perf_counter`` stamp."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self.mark = time.perf_counter()

    def start(self) -> None:
        """Begin a step: time since the last lap belongs to nobody."""
        self.mark = time.perf_counter()

    def lap(self, part: str) -> None:
        """Time since the last mark was spent on ``part``."""
        now = time.perf_counter()
        self._seconds[part] += now - self.mark
        self.mark = now

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by part so far."""
        return dict(self._seconds)


def _all_sources() -> Counter[str]:
    # Every key is there from the start, so that another thread may read while the engine counts.
    return Counter(dict.fromkeys(SOURCES[1:], 0))


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine started."""

    steps: int = 0
    finished: int = 0
    emitted_tokens: int = 0
    computed_tokens: int = 0
    drafted: Counter[str] = field(default_factory=_all_sources)
    accepted: Counter[str] = field(default_factory=_all_sources)
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
