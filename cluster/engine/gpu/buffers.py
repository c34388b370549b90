"""Memory of fixed size that a step of one shape is described in, and the one copy that brings it to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cluster.engine.attention import Segment
from cluster.engine.gpu.shapes import StepShape
from cluster.engine.transfer import pinned_bytes

_TOKEN_FIELDS, _TILE_FIELDS = 5, 5
_WORD = 8  # bytes of an int64


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Views of one block of bytes. Padding tokens and tiles are zero but for their rows, which are the spare one.

    Attributes:
        ids, positions: int64 [T].
        rows: int64 [T], pool rows of the tokens.
        slots: int64 [T], each token's place among the N * W queries.
        keep: int64 [T], tokens whose logits are wanted; then zeros.
        start: int64 [N], first pool row of the tile's sequence.
        length: int64 [N], its tokens in the pool from earlier steps.
        first, last: int64 [N], its first and last token in the packed row.
        base: int64 [N], the tile's first token in the packed row.
        sees: bool [T, T], which tokens of the packed row a token sees; only its own sequence's.
    """

    ids: Tensor
    positions: Tensor
    rows: Tensor
    slots: Tensor
    keep: Tensor
    start: Tensor
    length: Tensor
    first: Tensor
    last: Tensor
    base: Tensor
    sees: Tensor

    @staticmethod
    def size(shape: StepShape) -> int:
        """Bytes of the block."""
        return _WORD * (_TOKEN_FIELDS * shape.tokens + _TILE_FIELDS * shape.tiles) + shape.tokens**2

    @classmethod
    def of(cls, block: Tensor, shape: StepShape) -> StepInputs:
        sizes = [shape.tokens] * _TOKEN_FIELDS + [shape.tiles] * _TILE_FIELDS
        numbers, relation = block.split([_WORD * sum(sizes), shape.tokens**2])
        square = relation.view(torch.bool).view(shape.tokens, shape.tokens)
        return cls(*[*numbers.view(torch.int64).split(sizes), square])


class StepBuffers:
    """A step's inputs on the device, filled anew for each step of their shape."""

    def __init__(self, shape: StepShape, device: torch.device, spare_row: int) -> None:
        """``spare_row`` is a row of the KV pool that belongs to no sequence."""
        self.shape = shape
        self._spare_row = spare_row
        self._block = torch.zeros(StepInputs.size(shape), dtype=torch.uint8, device=device)
        self.inputs = StepInputs.of(self._block, shape)

    def fill(self, segments: Sequence[Segment], keep: np.ndarray) -> None:
        """Send a step to the device; the host does not wait for the copy."""
        block = pinned_bytes(len(self._block), self._block.device)
        block.zero_()
        self._write(StepInputs.of(block, self.shape), segments, keep)
        self._block.copy_(block, non_blocking=True)

    def _write(self, host: StepInputs, segments: Sequence[Segment], keep: np.ndarray) -> None:
        width = self.shape.width
        widths = np.array([s.width for s in segments])
        starts, lengths = (np.array([getattr(s, name) for s in segments]) for name in ("start", "length"))
        first = np.cumsum(widths) - widths
        tiles = -(-widths // width)
        first_tile = np.cumsum(tiles) - tiles
        total, used = int(widths.sum()), int(tiles.sum())
        number = np.arange(total)
        host.ids.numpy()[:total] = np.concatenate([s.tokens for s in segments])
        host.positions.numpy()[:total] = np.concatenate([s.depths for s in segments]) + np.repeat(lengths, widths)
        host.rows.fill_(self._spare_row)
        host.rows.numpy()[:total] = number + np.repeat(starts + lengths - first, widths)
        host.slots.numpy()[:total] = number + np.repeat(first_tile * width - first, widths)
        host.keep.numpy()[: len(keep)] = keep
        host.start.fill_(self._spare_row)
        host.start.numpy()[:used] = np.repeat(starts, tiles)
        host.length.numpy()[:used] = np.repeat(lengths, tiles)
        host.first.numpy()[:used] = np.repeat(first, tiles)
        host.last.numpy()[:used] = np.repeat(first + widths - 1, tiles)
        host.base.numpy()[:used] = np.repeat(first - first_tile * width, tiles) + np.arange(used) * width
        sees = host.sees.numpy()
        for segment, at in zip(segments, first.tolist(), strict=True):
            sees[at : at + segment.width, at : at + segment.width] = segment.relation()
