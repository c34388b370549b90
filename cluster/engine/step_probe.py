"""Steps of which nothing is kept, to be timed."""

from __future__ import annotations

import numpy as np

from cluster.decoding.ranking import Ranking
from cluster.engine.attention import Segment
from cluster.engine.kv_cache import KVPool
from cluster.engine.target_model import TargetModel


class StepProbe:
    """Runs steps of one sequence in free rows of the pool."""

    def __init__(self, target: TargetModel, pool: KVPool) -> None:
        self._target = target
        self._pool = pool

    def __call__(self, width: int, context: int) -> None:
        """A step of ``width`` tokens over ``context`` of them, less context where memory is short."""
        allocator = self._pool.allocator
        extent = allocator.allocate(context + width) or allocator.allocate(width)
        if extent is None:
            return
        tokens, depths = np.zeros(width, np.int32), np.arange(width, dtype=np.int32)
        segment = Segment(extent.start, extent.size - width, tokens, depths, None)
        logits = self._target.forward(self._target.lay_out([segment]), np.arange(width))
        Ranking(logits).best(1)  # waits for a GPU
        allocator.free(extent)
