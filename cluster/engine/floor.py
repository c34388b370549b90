"""What the hardware allows: the least time that a step can take, from measured memory bandwidth and matrix rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from cluster.models import LoadedModel

_READ_BYTES = 1 << 28  # far beyond caches
_MATRIX = 1024  # rows and columns of the matrices multiplied
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Hardware:
    """Bytes a second that can be read from memory, and operations a second of matrix products."""

    bandwidth: float
    matrix_rate: float

    @staticmethod
    def measure(device: torch.device, dtype: torch.dtype) -> Hardware:
        """Best of a few tries; of float32 and ``dtype`` the faster one, as a kernel may convert."""
        block = torch.ones(_READ_BYTES // 4, device=device)
        seconds = _best(block.sum, device)
        rates = []
        for kind in {dtype, torch.float32}:
            matrix = torch.ones(_MATRIX, _MATRIX, dtype=kind, device=device)
            rates.append(2 * _MATRIX**3 / _best(partial(torch.mm, matrix, matrix), device))
        return Hardware(_READ_BYTES / seconds, max(rates))


@dataclass(frozen=True, slots=True)
class StepFloor:
    """The least work of a step, and the time it takes at full speed.

    Attributes:
        weight_bytes: parameters that a token passes, read once a step.
        kv_bytes: keys and values of a token of context.
        operations: multiplications and additions of a token.
    """

    weight_bytes: int
    kv_bytes: int
    operations: int

    @staticmethod
    def of(loaded: LoadedModel, kv_bytes: int) -> StepFloor:
        """From a model's linear layers, the output layer included, as they are before an engine packs them."""
        weights = [m.weight for m in loaded.model.modules() if isinstance(m, nn.Linear)]
        count = sum(w.numel() for w in weights)
        return StepFloor(count * loaded.dtype.itemsize, kv_bytes, 2 * count)

    def seconds(self, hardware: Hardware, tokens: int, context: int) -> float:
        """Of a step of so many tokens over so much context, all sequences together."""
        reading = (self.weight_bytes + context * self.kv_bytes) / hardware.bandwidth
        return max(reading, tokens * self.operations / hardware.matrix_rate)


def _best(run: Callable[[], object], device: torch.device) -> float:
    run()
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
