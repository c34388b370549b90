"""How much of the grown trees is worth verifying: the budget of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_TRUST = 0.9  # of a path probability: those that look best among many are estimated too high more often than too low
_MARGIN = 1.03  # times vanilla's expected tokens per second, below which estimates are too rough to draft for


def worthwhile(costs: NDArray[np.float64], sequences: int) -> float:
    """The path probability below which a draft token can not pay, whatever else is drafted.

    The last node drafted emits at least as many tokens in the time it adds as a vanilla step does in that time. Costs
    are those of ``tree_sizes``.
    """
    if len(costs) < 2:
        return 1.0
    return float(np.clip(sequences / costs[0] * np.diff(costs).min(), 0.0, 1.0))


def tree_sizes(
    probabilities: Sequence[NDArray[np.float32]], costs: NDArray[np.float64], *, sure: float = 0.0
) -> list[int]:
    """Nodes of each grown tree to draft, the root included, so that expected tokens per second are highest.

    Nothing is drafted where even that is hardly more than without drafts.

    Args:
        probabilities: path probabilities of each tree's nodes, root first, falling.
        costs: float64 [M + 1], seconds of the step if it drafts 0..M nodes.
        sure: tokens that the step is expected to emit for other sequences.
    """
    flat = np.concatenate([p[1:] for p in probabilities]) if probabilities else np.empty(0, np.float32)
    owners = np.repeat(np.arange(len(probabilities)), [len(p) - 1 for p in probabilities])
    best_first = np.argsort(-flat, kind="stable")[: len(costs) - 1]
    gained = _TRUST * np.concatenate(([0.0], np.cumsum(flat[best_first], dtype=np.float64)))
    expected = len(probabilities) + sure + gained
    rates = expected / costs[: len(expected)]
    drafted = int(np.argmax(rates))
    if rates[drafted] < _MARGIN * rates[0]:
        drafted = 0
    return (1 + np.bincount(owners[best_first[:drafted]], minlength=len(probabilities))).tolist()
