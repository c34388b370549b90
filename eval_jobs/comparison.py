"""What a comparison of systems on the same prompts says: pure functions of their generations."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eval_jobs.systems import Generation

# Gap between two candidates' logits at a divergence: (prompt index, tokens in common, one id, other id) -> gap
GapMeter = Callable[[int, Sequence[int], int, int], float]


def summarize(runs: Mapping[str, Sequence[Generation]], gap: GapMeter) -> dict[str, dict[str, Any]]:
    """Figures by system.

    Args:
        runs: for each system its generations, prompt by prompt in the same order.
        gap: measures how near a tie was where two greedy outputs part.
    """
    return {name: _summary(name, runs, gap) for name in runs}


def _summary(name: str, runs: Mapping[str, Sequence[Generation]], gap: GapMeter) -> dict[str, Any]:
    mine = runs[name]
    tokens = sum(len(g.token_ids) for g in mine)
    seconds = sum(g.seconds for g in mine)
    steps = sum(g.decode_steps for g in mine)
    reference = "hf" if name == "vanilla" else "vanilla"
    return {
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 3),
        "mat": round((tokens - len(mine)) / steps, 4) if steps else None,
        "speedup_vs_hf": _speedup(mine, runs.get("hf")),
        "speedup_vs_vanilla": _speedup(mine, runs.get("vanilla")),
        "identical_to_hf": _identical(mine, runs.get("hf")),
        "identical_to_vanilla": _identical(mine, runs.get("vanilla")),
        "worst_divergence_gap": _worst_gap(mine, runs.get(reference), gap),
        "retrieval_success": round(sum(g.retrieved_steps for g in mine) / steps, 4) if steps else None,
        "time_share": _time_share(mine),
        "sources": _sources(mine),
    }


def _speedup(mine: Sequence[Generation], base: Sequence[Generation] | None) -> float | None:
    """Median over prompts of the ratio of tokens per second."""
    if base is None:
        return None
    ratios = [(len(m.token_ids) / m.seconds) / (len(b.token_ids) / b.seconds) for m, b in zip(mine, base, strict=True)]
    return round(statistics.median(ratios), 4)


def _identical(mine: Sequence[Generation], base: Sequence[Generation] | None) -> int | None:
    if base is None:
        return None
    return sum(m.token_ids == b.token_ids for m, b in zip(mine, base, strict=True))


def _worst_gap(mine: Sequence[Generation], base: Sequence[Generation] | None, gap: GapMeter) -> float | None:
    """Largest logit gap at which the two part; 0.0 if they never do, None without a reference."""
    if base is None:
        return None
    worst = 0.0
    for i, (m, b) in enumerate(zip(mine, base, strict=True)):
        at = divergence(m.token_ids, b.token_ids)
        if at is not None:
            worst = max(worst, gap(i, b.token_ids[:at], m.token_ids[at], b.token_ids[at]))
    return round(worst, 6)


def divergence(a: Sequence[int], b: Sequence[int]) -> int | None:
    """First position at which two outputs differ, None if one begins with the other."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


def _sources(mine: Sequence[Generation]) -> dict[str, dict[str, int]]:
    """Draft tokens proposed and accepted, by the source that made them likeliest."""
    totals: dict[str, dict[str, int]] = {}
    for generation in mine:
        for kind, counts in (("drafted", generation.drafted), ("accepted", generation.accepted)):
            for source, count in counts.items():
                totals.setdefault(source, {"drafted": 0, "accepted": 0})[kind] += count
    return totals


def _time_share(mine: Sequence[Generation]) -> dict[str, float] | None:
    parts = [g.part_seconds for g in mine if g.part_seconds]
    if not parts:
        return None
    totals = {part: sum(p[part] for p in parts) for part in parts[0]}
    whole = sum(totals.values())
    return {part: round(value / whole, 5) for part, value in totals.items()}
