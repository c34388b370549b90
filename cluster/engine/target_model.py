"""The target model behind the engine: an unmodified causal LM, run on packed rows against our KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cluster.engine import cpu, gpu
from cluster.engine.attention import PackedAttention, PackedBatch, Segment
from cluster.engine.config import EngineConfig
from cluster.engine.kv_cache import KVPool, LayerShape, ShapeProbe
from cluster.engine.packed_model import PackedModel
from cluster.engine.transfer import upload
from cluster.models import LoadedModel, ModelError


class Way(Protocol):
    """A way to run some kinds of steps faster than by calling the model."""

    def __call__(self, batch: PackedBatch, keep: np.ndarray) -> Tensor | None:
        """What ``TargetModel.forward`` gives; None if the step is of another kind."""
        ...


class TargetModel:
    """Runs a step's segments through the model and returns logits where they are wanted."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        """Get ``loaded`` ready; ``config`` says what to do for speed (``optimize``, ``static_shapes``)."""
        self.loaded = loaded
        self.device = loaded.device
        self._config = config
        self._attention = PackedAttention()
        self._model = PackedModel(loaded.model, self._attention)
        self._ways: list[Way] = []
        self.shapes = self._discover_shapes()
        self._has_static_shapes = self.device.type != "cpu" if config.static_shapes is None else config.static_shapes
        self._has_kernels = self.device.type == "cpu" and not self._has_static_shapes and cpu.available()

    def use_store(self, store: KVPool) -> None:
        """Keep keys and values in ``store`` from here on."""
        self._attention.store = store
        self._ways = self._find_ways(store)

    def lay_out(self, segments: Sequence[Segment]) -> PackedBatch:
        """Lay out a step for ``forward``."""
        return PackedBatch.of(segments, self.device, kernels=self._has_kernels)

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, keep: np.ndarray) -> Tensor:
        """One forward pass.

        Args:
            batch: the segments' tokens; their keys and values are stored in the pool.
            keep: int64 [K], indices into the packed row whose logits are wanted.

        Returns:
            Logits [K, V] in the model's dtype, which hold until the next forward pass.
        """
        for way in self._ways:
            logits = way(batch, keep)
            if logits is not None:
                return logits
        return self._model(*_row(batch), upload(keep, self.device), batch)

    def _find_ways(self, store: KVPool) -> list[Way]:
        if self._has_static_shapes:
            capture = gpu.capture_for(self.device)
            return [gpu.StaticStep(self._model, self.device, store.spare_row, capture, self._config.max_graphs)]
        if self._config.optimize and self.device.type == "cpu":
            cpu.optimize(self.loaded.model)
            direct = cpu.find_direct(self.loaded.model)
            return [_Direct(direct, self._attention)] if direct is not None else []
        return []

    def _discover_shapes(self) -> list[LayerShape]:
        """Layer shapes, learnt by running one token."""
        self._attention.store = probe = ShapeProbe()
        token = np.zeros(1, np.int32)
        # Without the kernels' layout, so that layers which an earlier engine fused run their own code.
        batch = PackedBatch.of([Segment(0, 0, token, token, None)], self.device, kernels=False)
        try:
            self.forward(batch, np.zeros(1, np.int64))
        except NotImplementedError as error:
            raise ModelError(f"{self.loaded.name}: {error}; this model cannot be verified in a tree") from error
        return probe.shapes()


class _Direct:
    """Steps that the CPU kernels run without the model's own Python."""

    def __init__(self, direct: cpu.DirectForward, attention: PackedAttention) -> None:
        self._direct = direct
        self._attention = attention

    def __call__(self, batch: PackedBatch, keep: np.ndarray) -> Tensor | None:
        if batch.tree_step is None or not self._direct.applies:
            return None
        self._attention.layout = batch
        return self._direct(*_row(batch), torch.from_numpy(keep), self._attention)


def _row(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Token ids and positions, int64 [1, T]."""
    return upload(batch.input_ids(), batch.device)[None], upload(batch.position_ids(), batch.device)[None]
