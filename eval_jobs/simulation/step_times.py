"""How long a step takes by its width: the curve that a simulation is given."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cluster.prompts import PromptFileError


class StepTimesError(PromptFileError):
    """A curve that cannot be read."""


@dataclass(frozen=True, slots=True)
class StepCurve:
    """Piecewise linear between the widths given; beyond them the last slope goes on.

    Attributes:
        widths: float64 [N], tokens of a step, rising from 1.
        seconds: float64 [N].
    """

    widths: NDArray[np.float64]
    seconds: NDArray[np.float64]

    def __call__(self, widths: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds of steps of these widths."""
        inside = np.interp(widths, self.widths, self.seconds)
        slope = 0.0
        if len(self.widths) > 1:
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.widths[-1] - self.widths[-2])
        return np.asarray(inside + np.maximum(widths - self.widths[-1], 0.0) * slope)


def read_curve(text: str) -> StepCurve:
    """A curve from ``WIDTH:MS,WIDTH:MS,…`` or from a JSON file ``{"WIDTH": MS, …}``.

    Raises:
        StepTimesError: it is neither, or does not begin at width 1.
    """
    try:
        if Path(text).is_file():
            pairs = {int(width): float(ms) for width, ms in json.loads(Path(text).read_text()).items()}
        else:
            pairs = {int(width): float(ms) for width, ms in (pair.split(":") for pair in text.split(","))}
    except (ValueError, OSError, AttributeError, TypeError, RecursionError) as error:
        raise StepTimesError(f"step times are WIDTH:MS,… or a JSON file of them, not {text!r}: {error}") from error
    widths = sorted(pairs)
    if not widths or widths[0] != 1 or not all(0 < ms < math.inf for ms in pairs.values()):
        raise StepTimesError("step times must be positive and begin with that of width 1")
    return StepCurve(np.array(widths, np.float64), np.array([pairs[w] / 1000 for w in widths]))
