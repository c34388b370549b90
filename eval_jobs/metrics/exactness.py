"""Is the output unchanged: each answer against vanilla's answer to the same prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eval_jobs.comparison import divergence
from eval_jobs.rows import Divergence, Key, Row

# Logit gaps that rounding explains, by type: forward passes of other shapes add up in another order.
NEAR_TIE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}


@dataclass(frozen=True, slots=True)
class Exactness:
    """Counts of answers.

    Attributes:
        identical: the same tokens.
        near_ties: they part where two candidates' logits are within rounding of each other.
        wrong: they part elsewhere, or one is longer.
        unknown: they part, and how near a tie it was has not been looked at (yet).
        worst_gap: the largest logit gap where they part.
    """

    identical: int
    near_ties: int
    wrong: int
    unknown: int
    worst_gap: float

    @property
    def compared(self) -> int:
        """Answers that vanilla gave to the same prompt; a later turn counts only if the turns before are the same."""
        return self.identical + self.near_ties + self.wrong + self.unknown


def exactness(pairs: Sequence[tuple[Row, Row]], divergences: Mapping[Key, Divergence]) -> Exactness | None:
    """Verdict on answers, each beside vanilla's; None if there is nothing to compare."""
    if not pairs:
        return None
    counts = {"identical": 0, "near_ties": 0, "wrong": 0, "unknown": 0}
    worst = 0.0
    for row, base in pairs:
        found = divergences.get(row.key)
        counts[_verdict(row, base, found)] += 1
        if found is not None:
            worst = max(worst, found.gap)
    return Exactness(**counts, worst_gap=worst)


def _verdict(row: Row, base: Row, found: Divergence | None) -> str:
    if row.output_ids == base.output_ids:
        return "identical"
    if divergence(row.output_ids, base.output_ids) is None:
        return "wrong"
    if found is None:
        return "unknown"
    return "near_ties" if found.gap <= NEAR_TIE.get(row.dtype, 0.0) else "wrong"
