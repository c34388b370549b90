"""How long a step takes, by the tokens it computes: measured once, refined while running."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_LONG_CONTEXT = 1024  # tokens of context for measuring what they cost
_WIDE = 16  # tokens of a step, for measuring what context costs a token more
_TOO_SLOW = 5.0  # times the narrowest step, beyond which the slope of the upper half goes on
_ROUNDS = 3
_PAIRS = 5  # of steps with and without context
_RATE = 0.05  # of an observation, for the widths next to it
_DRIFT = 0.08  # and for all widths: what makes a step slower or faster mostly is the state of the machine
_OUTLIER = 2.0  # ratios beyond this (something else had the machine) count as this

Probe = Callable[[int, int], None]


class StepTimes:
    """Piecewise linear in the tokens computed (the width); context costs by its tokens and by those attending to them.

    Args:
        probe: runs a step of so many tokens over a context of so many. It is called at the first use.
        longest: most tokens of context that it can be asked for.
    """

    def __init__(self, probe: Probe, longest: int) -> None:
        self._probe = probe
        self._longest = longest
        self._widths: NDArray[np.float64] = np.empty(0)
        self._seconds: NDArray[np.float64] = np.empty(0)
        self._context_seconds = 0.0  # a token of context, read for a sequence
        self._attended_seconds = 0.0  # and for each further token of the sequence that attends to it

    @property
    def is_measured(self) -> bool:
        """Whether there is anything to refine."""
        return len(self._widths) > 0

    def measure(self) -> None:
        """Time steps of rising width, until they are slow, in several rounds: the best of each counts."""
        best: dict[int, float] = {}
        for width in _WIDTHS:
            self._probe(width, 0)  # what is compiled or allocated at the first time does not count
            best[width] = self._time(width, 0)
            if len(best) > 3 and best[width] > _TOO_SLOW * best[1]:
                break
        for _ in range(_ROUNDS):
            for width in best:
                best[width] = min(best[width], self._time(width, 0))
        self._measure_context(max(w for w in best if w <= _WIDE))
        self._widths = np.array(list(best), np.float64)
        self._seconds = _rising(np.array(list(best.values())))

    def measure_once(self) -> None:
        """Measure unless that has been done."""
        if not self.is_measured:
            self.measure()

    def predict(self, widths: NDArray[np.float64], context: int, sequences: int = 1) -> NDArray[np.float64]:
        """Seconds of steps of these widths over so many tokens of context, all sequences together."""
        read, attended = self._of_context(widths, context, sequences)
        return np.asarray(self._of_width(widths) + read + attended)

    def of_drafting(self, rows: int, most: int, context: int, sequences: int = 1) -> NDArray[np.float64]:
        """float64 [most + 1]: seconds of a step of ``rows`` tokens and 0..most draft tokens."""
        self.measure_once()
        return self.predict(rows + np.arange(most + 1, dtype=np.float64), context, sequences)

    def refine(self, width: int, context: int, seconds: float, sequences: int = 1) -> None:
        """Move all times a little and those next to an observed width more towards what a step took.

        Without the former, the times of widths that are not tried stay those of the machine's state at the start.
        """
        widths = np.array([width], np.float64)
        read, attended = self._of_context(widths, context, sequences)
        parts = np.array([self._of_width(widths)[0], read, attended[0]])
        predicted = parts.sum()
        surplus = min(max(seconds / predicted, 1 / _OUTLIER), _OUTLIER) - 1
        # Each part moves by its share, so that what one of them gets wrong does not spoil the others.
        surplus, of_reading, of_attending = surplus * parts / predicted
        self._seconds *= 1 + _DRIFT * surplus
        self._context_seconds *= 1 + _DRIFT * of_reading
        self._attended_seconds *= 1 + _DRIFT * of_attending
        right = int(np.clip(np.searchsorted(self._widths, width), 1, len(self._widths) - 1))
        left = right - 1
        share = np.clip((width - self._widths[left]) / (self._widths[right] - self._widths[left]), 0.0, 1.0)
        self._seconds[left] *= 1 + _RATE * (1 - share) * surplus
        self._seconds[right] *= 1 + _RATE * share * surplus
        near = left if share < 0.5 else right
        np.minimum(self._seconds[:near], self._seconds[near], out=self._seconds[:near])
        np.maximum(self._seconds[near:], self._seconds[near], out=self._seconds[near:])

    def _of_width(self, widths: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds of steps without context."""
        inside = np.interp(widths, self._widths, self._seconds)
        middle = len(self._widths) // 2
        slope = (self._seconds[-1] - self._seconds[middle]) / (self._widths[-1] - self._widths[middle])
        return np.asarray(inside + np.maximum(widths - self._widths[-1], 0.0) * slope)

    def _of_context(
        self, widths: NDArray[np.float64], context: int, sequences: int
    ) -> tuple[float, NDArray[np.float64]]:
        """Seconds for reading the context, and for the tokens beyond one a sequence that attend to theirs."""
        attended = np.maximum(widths - sequences, 0.0) * (context / sequences) * self._attended_seconds
        return context * self._context_seconds, attended

    def _measure_context(self, wide: int) -> None:
        """What a long context adds to steps of 1 and of ``wide`` tokens: the median of several pairs of steps."""
        context = max(1, min(_LONG_CONTEXT, self._longest))
        one, several = (
            float(np.median([self._time(width, context) - self._time(width, 0) for _ in range(_PAIRS)]))
            for width in (1, wide)
        )
        self._context_seconds = max(0.0, one) / context
        self._attended_seconds = max(0.0, several - max(0.0, one)) / ((wide - 1) * context)

    def _time(self, width: int, context: int) -> float:
        start = time.perf_counter()
        self._probe(width, context)
        return time.perf_counter() - start


def _rising(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """No narrower step takes longer than a wider one: whatever disturbs a measurement only adds to it."""
    return np.asarray(np.minimum.accumulate(seconds[::-1])[::-1])
