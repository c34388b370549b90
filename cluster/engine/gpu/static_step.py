"""Steps whose tensors have one of few shapes and stay where they are, recorded at the first use of a shape."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cluster.engine.attention import Layout, PackedBatch
from cluster.engine.gpu.buffers import StepBuffers
from cluster.engine.gpu.capture import Capture, Run, without_host_reads
from cluster.engine.gpu.shapes import MOST_TOKENS, StepShape
from cluster.engine.gpu.tiles import TileLayout

_log = logging.getLogger(__name__)


class ModelCall(Protocol):
    """The model, run on a step's tokens."""

    def __call__(self, ids: Tensor, positions: Tensor, keep: Tensor, layout: Layout) -> Tensor:
        """Logits [K, V] at ``keep`` (int64 [K]) of the tokens ``ids`` at ``positions`` (int64 [1, T])."""
        ...


class StaticStep:
    """Runs steps through recordings; the way of a ``TargetModel`` on a GPU.

    All recordings leave their logits in the same memory: they hold until the next step.
    """

    def __init__(self, model: ModelCall, device: torch.device, spare_row: int, capture: Capture, most: int) -> None:
        """Get ready to record.

        Args:
            model: what is recorded.
            device: where it runs.
            spare_row: a row of the KV pool that belongs to no sequence.
            capture: how to record.
            most: recordings kept; the one unused for longest goes first.
        """
        self._model = model
        self._device = device
        self._spare_row = spare_row
        self._capture: Capture | None = capture
        self._most = most
        self._recorded: OrderedDict[StepShape, tuple[StepBuffers, Run]] = OrderedDict()
        self._logits: Tensor | None = None

    @property
    def shapes(self) -> list[StepShape]:
        """Shapes that are recorded, the one unused for longest first."""
        return list(self._recorded)

    def __call__(self, batch: PackedBatch, keep: np.ndarray) -> Tensor | None:
        """Logits [K, V] as ``TargetModel.forward`` gives them; None if the step is not one to record."""
        if self._capture is None:
            return None
        shape = StepShape.of([s.width for s in batch.segments], [s.length for s in batch.segments])
        if shape is None:
            return None
        if shape in self._recorded:
            self._recorded.move_to_end(shape)
            buffers, run = self._recorded[shape]
            buffers.fill(batch.segments, keep)
        else:
            buffers = StepBuffers(shape, self._device, self._spare_row)
            buffers.fill(batch.segments, keep)
            try:
                run = self._record(buffers, self._capture)
            except RuntimeError as error:
                _log.warning("steps run without being recorded from here on: %s", error)
                self._capture = None
                self._recorded.clear()
                return None
            self._recorded[shape] = buffers, run
            if len(self._recorded) > self._most:
                self._recorded.popitem(last=False)
        run()
        assert self._logits is not None
        return self._logits[: len(keep)]

    def _record(self, buffers: StepBuffers, capture: Capture) -> Run:
        model, shape, inputs = self._model, buffers.shape, buffers.inputs

        def forward() -> Tensor:
            return model(inputs.ids[None], inputs.positions[None], inputs.keep, TileLayout(shape, inputs))

        logits = without_host_reads(forward)
        if self._logits is None:
            self._logits = logits.new_empty((MOST_TOKENS, logits.shape[1]))
        shared = self._logits[: shape.tokens]

        def run() -> None:
            shared.copy_(forward())

        return capture(run)
