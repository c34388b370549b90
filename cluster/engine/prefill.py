"""How many prompt tokens a step takes beside running sequences, so that these keep their pace."""

from __future__ import annotations

import numpy as np

from cluster.engine.step_times import StepTimes

_STRETCH = 2.0  # times a step's length without prompts, which a prompt may make it
_MOST = 8.0  # and many prompts beside few sequences: else all would wait long, so that few need not wait a little
_SIZES = np.array([8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512])  # few, so that steps have few shapes
_UNTIMED = 32  # while nobody has measured steps


def tokens_beside(times: StepTimes, decoding: int, context: int, prompts: int = 1) -> int:
    """Prompt tokens beside so many decoding sequences.

    A smaller chunk costs the prompt little where a step's time grows with its width, as on a CPU; where it does not,
    as on a GPU, large ones fit.

    Args:
        times: of steps.
        decoding: tokens that the step computes without prompts.
        context: tokens that all sequences attend to.
        prompts: how many of them there are.
    """
    if not times.is_measured:
        return _UNTIMED
    seconds = times.predict(decoding + np.array([0.0, *_SIZES]), context, max(decoding, 1))
    stretch = min(_STRETCH + (prompts - 1) / max(decoding, 1), _MOST)
    fitting = int(np.searchsorted(seconds[1:], stretch * seconds[0], side="right"))
    return int(_SIZES[max(0, fitting - 1)])
