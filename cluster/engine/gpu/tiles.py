"""Attention in tiles: a step's masks and the pool rows of its keys, worked out on the device.

The host sends a few numbers for each token and tile, and which of the step's tokens see which. The device makes masks
[N, W, S] and key rows [N, S] from them, once a step.

Keys and values are gathered from the pool into [N, S] for a call of ``scaled_dot_product_attention``. That reads the
used rows once more than a kernel that walks the pool by itself, but takes any mask, head size and type, lets torch
choose among its fused kernels, and is the same code on every device. (FlexAttention reads the pool in place, but has
to be compiled for each kind of mask and packs queries of different sequences in blocks that then read the keys of
all; ``varlen`` attention takes no tree masks.)

Padding never mixes with what counts: padding tokens write to the pool's spare row; keys beyond a sequence's end are
its last row again, masked; what padding queries see does not matter, as nobody reads what they get.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cluster.engine.attention import attend
from cluster.engine.gpu.buffers import StepInputs
from cluster.engine.gpu.shapes import StepShape

_KEYS_AT_ONCE = 1 << 16  # keys gathered together, which bounds the memory that takes


class TileLayout:
    """Where one run of a step finds its tokens, keys and masks; see ``attention.Layout``."""

    tree_step = None

    def __init__(self, shape: StepShape, inputs: StepInputs) -> None:
        """Work out what all layers share, on the device alone."""
        self._shape = shape
        self._inputs = inputs
        device = inputs.ids.device
        self._numbers = torch.arange(shape.keys, device=device)
        total = (inputs.length + inputs.last - inputs.first + 1)[:, None]
        queries = inputs.base[:, None] + torch.arange(shape.width, device=device)
        self._queries = torch.minimum(queries, inputs.last[:, None])
        self._exists = self._numbers < total
        self._key_rows = inputs.start[:, None] + torch.minimum(self._numbers, total - 1)
        self._masks: dict[int | None, Tensor] = {}

    @property
    def rows(self) -> Tensor:
        """int64 [T] pool rows that new keys and values go to."""
        return self._inputs.rows

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Query [1, heads, T, dim] against pool tensors [kv_heads, rows, dim]; returns [T, heads, dim]."""
        shape, (heads, _, dim) = self._shape, query.shape[1:]
        queries = query[0].index_select(1, self._queries.flatten())
        queries = queries.view(heads, shape.tiles, shape.width, dim).transpose(0, 1)
        mask = self._mask(window, query.dtype)
        outs = []
        together = max(1, _KEYS_AT_ONCE // shape.keys)
        for at in range(0, shape.tiles, together):
            part = slice(at, at + together)
            keys, values = self._gather(key, part), self._gather(value, part)
            outs.append(attend(queries[part], keys, values, mask[part], scale, softcap))
        return torch.cat(outs).flatten(0, 1).index_select(0, self._inputs.slots)

    def _gather(self, pool: Tensor, part: slice) -> Tensor:
        """Rows of the pool [n, kv_heads, S, dim] for some of the tiles."""
        rows = self._key_rows[part]
        return pool.index_select(1, rows.flatten()).view(pool.shape[0], *rows.shape, pool.shape[2]).transpose(0, 1)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [N, W, S] (0 or -inf), built once a run."""
        if window not in self._masks:
            hidden = ~self._visible(window)
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._masks[window] = bias.masked_fill_(hidden, -torch.inf)
        return self._masks[window]

    def _visible(self, window: int | None) -> Tensor:
        """Bool [N, W, S]: old keys, and of the new ones those that a query's token sees."""
        inputs = self._inputs
        new = self._numbers - inputs.length[:, None]
        tokens = (inputs.first[:, None] + new).clamp(0, self._shape.tokens - 1)
        is_seen = inputs.sees[self._queries[:, :, None], tokens[:, None, :]]
        visible = ((new < 0)[:, None] | is_seen) & self._exists[:, None]
        if window is not None:
            positions = torch.where(new < 0, self._numbers, inputs.positions[tokens])
            visible &= inputs.positions[self._queries][:, :, None] - positions[:, None, :] < window
        return visible
