"""The size of tree that brings most tokens a second, for methods that fill trees of any size."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cluster.decoding.params import MAX_CAPACITY

# What trees of so many nodes add to a step's one token: replay of LogitSpec's rule over 45 recorded answers of
# Spec-Bench, GSM8K and HumanEval (docs/results/cpu-avx2.md). Of the curve only the shape counts: its height is learnt.
_CAPACITIES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
_GAINS = (0.0, 0.38, 0.43, 0.60, 0.73, 0.84, 0.93, 1.00, 1.17, 1.34)
_GAIN = np.interp(np.log2(np.arange(1, MAX_CAPACITY + 1)), np.log2(_CAPACITIES), _GAINS)  # of capacities 1, 2, ...
_MEMORY = 0.995  # of what was seen, after each tree
_TRUST = 5.0  # tokens that the curve's own height counts for, beside what was seen: a dozen small trees or so
_WORTH = 1.03  # a tree must bring this much more than none


class Fitting:
    """The capacity of a method's trees, chosen anew for each step.

    Wider steps take longer, and how much longer depends on the device, on how many sequences share the step, and on
    what else they compute. What a wider tree brings depends on the text: the curve above, scaled by what the last
    two hundred trees or so brought. While no tree pays none is tried, and what was seen is forgotten until one is.
    """

    def __init__(self) -> None:
        self.capacity = 1
        self._expected = self._brought = 0.0

    def choose(self, costs: NDArray[np.float64]) -> int:
        """Set the capacity, and return it.

        Args:
            costs: float64 [C], seconds of the step if trees have capacities 1..C, at most MAX_CAPACITY.
        """
        height = (_TRUST + self._brought) / (_TRUST + self._expected)
        rates = (1.0 + height * _GAIN[: len(costs)]) / costs
        best = int(np.argmax(rates))
        self.capacity = 1 + best if rates[best] > _WORTH * rates[0] else 1
        return self.capacity

    def observe(self, accepted: int) -> None:
        """Learn from a verified tree of this capacity, of which so many drafts were accepted."""
        self._expected = _MEMORY * self._expected + float(_GAIN[self.capacity - 1])
        self._brought = _MEMORY * self._brought + accepted
