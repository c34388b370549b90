"""What speculation did: accepted tokens by source, depth and rank, retrieval, next-next hits, where the time goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import numpy as np

from eval_jobs.rows import Row, Trace

HIT_RANKS = 60

Counts = tuple[int, int]  # accepted, drafted


def mean_accepted_tokens(rows: Iterable[Row]) -> float | None:
    """Tokens a decode step (MAT)."""
    done = [r for r in rows if r.decode_steps]
    steps = sum(r.decode_steps for r in done)
    return sum(sum(r.step_tokens) for r in done) / steps if steps else None


def by_source(rows: Sequence[Row]) -> dict[str, Counts]:
    """(accepted, drafted) tokens of each source that drafted any."""
    drafted: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for row in rows:
        drafted.update(row.drafted)
        accepted.update(row.accepted)
    return {source: (accepted[source], count) for source, count in sorted(drafted.items()) if count}


def by_depth(rows: Sequence[Row]) -> list[Counts]:
    """(accepted, drafted) tokens at depth 1, 2, …"""
    return _sum_up([r.accepted_depths for r in rows], [r.drafted_depths for r in rows])


def by_rank(rows: Sequence[Row]) -> list[Counts]:
    """(accepted, drafted) next-next guesses of rank 1, 2, …"""
    return _sum_up([r.accepted_ranks for r in rows], [r.drafted_ranks for r in rows])


def steps_reaching(rows: Sequence[Row]) -> list[float]:
    """Share of decode steps whose accepted path reaches depth 1, 2, …; their sum is MAT - 1."""
    steps = sum(r.decode_steps for r in rows)
    return [accepted / steps for accepted, _ in by_depth(rows)] if steps else []


def _sum_up(accepted: Iterable[Sequence[int]], drafted: Iterable[Sequence[int]]) -> list[Counts]:
    totals = [[sum(column) for column in zip_longest(*lists, fillvalue=0)] for lists in (accepted, drafted)]
    return [(a, d) for a, d in zip_longest(*totals, fillvalue=0)]


def retrieval_success(rows: Iterable[Row]) -> float | None:
    """Share of decode steps in which a query found a continuation."""
    done = list(rows)
    steps = sum(r.decode_steps for r in done)
    return sum(r.retrieved_steps for r in done) / steps if steps else None


def next_next_hit_rate(traces: Iterable[Trace]) -> list[float]:
    """How often the token after the next is among the k best of the last logits, for k = 1 … 60; [] of nothing."""
    ranks = np.array([rank for t in traces for rank in t.ranks])
    if not len(ranks):
        return []
    hits = np.bincount(ranks, minlength=HIT_RANKS + 1)[1 : HIT_RANKS + 1]
    return (np.cumsum(hits) / len(ranks)).tolist()


def time_share(rows: Iterable[Row]) -> dict[str, float]:
    """Shares of the parts of a step in the time; empty if nobody says."""
    totals: Counter[str] = Counter()
    for row in rows:
        totals.update(row.part_seconds)
    whole = totals.total()
    return {part: seconds / whole for part, seconds in totals.items()} if whole else {}
