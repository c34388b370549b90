"""How fast: tokens a second, speedups with their uncertainty, latencies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eval_jobs.rows import Row

_RESAMPLES = 1000
_INTERVAL = (2.5, 97.5)
_PERCENTILES = (50, 90, 99)

Rates = NDArray[np.float64]
Place = tuple[tuple[str, str], int]  # a task and a repeat


@dataclass(frozen=True, slots=True)
class Speedup:
    """A method's speed as a multiple of another's.

    Attributes:
        median: over the repeats.
        lowest, highest: of the repeats.
        low, high: 95% bootstrap interval of the median, questions resampled.
        questions: answered by both in every repeat.
    """

    median: float
    lowest: float
    highest: float
    low: float
    high: float
    questions: int


def tokens_per_second(rows: Iterable[Row]) -> float | None:
    """All tokens over all the time they took of the device."""
    done = [r for r in rows if r.error is None]
    seconds = sum(r.busy_seconds for r in done)
    return sum(len(r.output_ids) for r in done) / seconds if seconds else None


def speedup(mine: Sequence[Row], base: Sequence[Row]) -> Speedup | None:
    """Ratio of the mean tokens a second over questions, as Spec-Bench takes it; None if no question is in both."""
    a, b = _rates(mine), _rates(base)
    repeats = sorted({place[1] for place in a.keys() & b.keys()})
    questions = sorted({place[0] for place in a})
    complete = [q for q in questions if all((q, r) in a and (q, r) in b for r in repeats)]
    if not complete or not repeats:
        return None
    one = np.array([[a[q, r] for q in complete] for r in repeats])
    other = np.array([[b[q, r] for q in complete] for r in repeats])
    ratios = one.mean(axis=1) / other.mean(axis=1)
    low, high = _interval(one, other)
    return Speedup(float(np.median(ratios)), float(ratios.min()), float(ratios.max()), low, high, len(complete))


def _rates(rows: Iterable[Row]) -> dict[Place, float]:
    """Tokens a second of each conversation in each repeat, all turns together; those with a failure left out."""
    tokens: dict[Place, int] = defaultdict(int)
    seconds: dict[Place, float] = defaultdict(float)
    failed: set[Place] = set()
    for row in rows:
        place = row.key.conversation, row.repeat
        tokens[place] += len(row.output_ids)
        seconds[place] += row.busy_seconds
        if row.error is not None:
            failed.add(place)
    return {place: tokens[place] / seconds[place] for place in tokens if place not in failed and seconds[place]}


def _interval(mine: Rates, base: Rates) -> tuple[float, float]:
    """Bootstrap interval of the median over repeats; rates [repeats, questions], questions drawn in pairs."""
    questions = mine.shape[1]
    drawn = np.random.default_rng(0).integers(0, questions, (_RESAMPLES, questions))
    ratios = mine[:, drawn].mean(axis=2) / base[:, drawn].mean(axis=2)
    low, high = np.percentile(np.median(ratios, axis=0), _INTERVAL)
    return float(low), float(high)


def time_to_first_token(rows: Iterable[Row]) -> dict[str, float] | None:
    """Percentiles, seconds."""
    return percentiles([r.chunk_seconds[0] for r in rows if r.chunk_seconds])


def inter_token_latency(rows: Iterable[Row]) -> dict[str, float] | None:
    """Percentiles of the time a token came after the one before it, seconds.

    Tokens of one step arrive together: the first waits for the step, the others for nothing.
    """
    gaps: list[float] = []
    for row in rows:
        for tokens, gap in zip(row.step_tokens, np.diff(row.chunk_seconds).tolist(), strict=True):
            gaps += [gap] + [0.0] * (tokens - 1)
    return percentiles(gaps)


def step_latency(rows: Iterable[Row]) -> dict[str, float] | None:
    """Percentiles of the time between chunks of tokens, seconds."""
    return percentiles([gap for row in rows for gap in np.diff(row.chunk_seconds).tolist()])


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90, p99; None of nothing."""
    if not values:
        return None
    return {f"p{p}": float(v) for p, v in zip(_PERCENTILES, np.percentile(values, _PERCENTILES), strict=True)}
