"""Attention over a packed row: the tokens of all sequences side by side, each seeing its own cache and tree.

A step's tokens form one row [1, T]. Token-wise layers (projections, MLPs, norms) need not know; attention does, and
this module provides it through transformers' public ``AttentionInterface``, so models run unmodified and no token is
padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from cluster.engine import cpu
from cluster.engine.kv_cache import KVStore
from cluster.engine.transfer import upload


@dataclass(slots=True)
class Segment:
    """One sequence's tokens in a step.

    They are a chain of tokens whose successors are known (prompt tokens and the last emitted one), with a draft tree
    hanging from the chain's last token.

    Attributes:
        start: first pool row of the sequence's extent.
        length: tokens whose keys and values are in the pool already.
        tokens: int32 [W], chain and tree tokens; their rows are start + length + 0..W-1.
        depths: int32 [W], position relative to ``length``.
        ancestors: bool [W, W] ancestor-or-self relation, None if all W tokens are one chain.
    """

    start: int
    length: int
    tokens: np.ndarray
    depths: np.ndarray
    ancestors: np.ndarray | None

    @property
    def width(self) -> int:
        return len(self.tokens)

    def relation(self) -> np.ndarray:
        """Bool [W, W] ancestor-or-self relation."""
        return np.tri(self.width, dtype=np.bool_) if self.ancestors is None else self.ancestors


class Layout(Protocol):
    """How a step's tokens lie in the packed row and in the pool, and what each of them attends to."""

    @property
    def rows(self) -> Tensor:
        """int64 [T]: pool rows the new keys and values go to."""
        ...

    @property
    def tree_step(self) -> cpu.TreeStep | None:
        """The same layout for the CPU kernels, where they are used."""
        ...

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Query [1, heads, T, dim] against pool tensors [kv_heads, rows, dim]; returns [T, heads, dim]."""
        ...


@dataclass(slots=True)
class PackedBatch:
    """A step's segments, laid out for one forward pass: the layout of steps of any shape.

    It attends with the CPU kernels where they are used, else segment by segment.
    """

    segments: Sequence[Segment]
    device: torch.device
    tree_step: cpu.TreeStep | None
    _rows: Tensor | None = None
    _masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device, *, kernels: bool) -> PackedBatch:
        """Lay out segments for a model on this device, with the CPU kernels or without them."""
        step = None
        if kernels:
            step = cpu.TreeStep(
                [s.start for s in segments],
                [s.length for s in segments],
                [s.width for s in segments],
                [s.ancestors for s in segments],
            )
        return cls(segments, device, step)

    def input_ids(self) -> np.ndarray:
        """int64 [T] token ids."""
        return np.concatenate([s.tokens for s in self.segments]).astype(np.int64)

    def position_ids(self) -> np.ndarray:
        """int64 [T] absolute positions."""
        return np.concatenate([s.depths.astype(np.int64) + s.length for s in self.segments])

    @property
    def rows(self) -> Tensor:
        """int64 [T]: pool rows the new keys and values go to."""
        if self._rows is None:
            rows = [np.arange(s.width, dtype=np.int64) + s.start + s.length for s in self.segments]
            self._rows = upload(np.concatenate(rows), self.device)
        return self._rows

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """See ``Layout``."""
        if self.tree_step is not None:
            packed = query[0].transpose(0, 1)
            return self.tree_step.attend(packed, key, value, scale=scale, window=window, softcap=softcap)
        heads, total = query.shape[1], query.shape[2]
        out = query.new_empty((total, heads, value.shape[-1]))
        at = 0
        for index, segment in enumerate(self.segments):
            part = slice(at, at + segment.width)
            rows = slice(segment.start, segment.start + segment.length + segment.width)
            mask = self._mask(index, window, query)
            out[part] = attend(query[:, :, part], key[None, :, rows], value[None, :, rows], mask, scale, softcap)[0]
            at += segment.width
        return out

    def _mask(self, index: int, window: int | None, like: Tensor) -> Tensor | None:
        """Additive mask [1, W, length + W] of a segment (0 or -inf), built once a step; None if all is visible."""
        segment = self.segments[index]
        if segment.width == 1 and (window is None or segment.length < window):
            return None
        key = (index, window)
        if key not in self._masks:
            visible = upload(_visible(segment, window), self.device)
            bias = torch.zeros(visible.shape, dtype=like.dtype, device=self.device).masked_fill_(~visible, -torch.inf)
            self._masks[key] = bias[None]
        return self._masks[key]


def _visible(segment: Segment, window: int | None) -> np.ndarray:
    """Bool [W, length + W]: which keys each of a segment's tokens may see."""
    width, length = segment.width, segment.length
    visible = np.ones((width, length + width), np.bool_)
    visible[:, length:] = segment.relation()
    if window is not None:
        keys = np.concatenate([np.arange(length), length + segment.depths])
        visible &= (length + segment.depths)[:, None] - keys[None, :] < window
    return visible


class PackedAttention:
    """The attention function and the cache that an engine hands to its model for the current step."""

    _registered = 0

    def __init__(self) -> None:
        """Register with transformers under a name of its own (``self.name``)."""
        PackedAttention._registered += 1
        self.name = f"logitspec_packed_{PackedAttention._registered}"
        self.store: KVStore | None = None
        self.layout: Layout | None = None
        AttentionInterface.register(self.name, _Weakly(self))

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """The cache's side: store new keys and values [1, kv_heads, T, dim], return the layer's whole pool."""
        assert self.store is not None and self.layout is not None
        return self.store.write(layer_idx, key[0], value[0], self.layout.rows)

    @property
    def tree_step(self) -> cpu.TreeStep | None:
        """The step's layout, by which fused CPU layers know that they may run (see ``engine.cpu.layers``)."""
        return self.layout.tree_step if self.layout is not None else None

    def pools(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, which fused CPU layers read and write themselves."""
        assert self.store is not None
        return self.store.pools(layer)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Models ask only to invent positions, which the engine always gives."""
        return 0

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        """Attend: query [1, heads, T, dim] against pool tensors [kv_heads, rows, dim]; returns [1, T, heads, dim]."""
        assert self.layout is not None
        _refuse_unknown(kwargs)
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        return self.layout.attend(query, key, value, scale, sliding_window, softcap)[None], None


class _Weakly:
    """Calls an attention without keeping it: transformers' registry is for good, the pool goes with its engine."""

    def __init__(self, attention: PackedAttention) -> None:
        self._attention = ref(attention)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        attention = self._attention()
        assert attention is not None
        return attention(*args, **kwargs)


def _refuse_unknown(kwargs: dict[str, object]) -> None:
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with {name!r} is not supported by the packed attention")


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """[N, heads, W, d] × [N, kv_heads, S, d] -> [N, W, heads, d], with an additive mask [N, W, S].

    Query heads that share a KV head become extra rows of it, so that its keys are read once.
    """
    tiles, heads, width, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    grouped = query.reshape(tiles, kv_heads, group * width, dim)
    if mask is not None:
        mask = mask[:, None].expand(-1, group, -1, -1).reshape(len(mask), 1, group * width, -1)
    if softcap is None:
        out = nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    else:  # Gemma 2 (arXiv 2408.00118): scores are bounded by cap * tanh(score / cap)
        scores = torch.tanh(grouped @ key.transpose(2, 3) * (scale / softcap)) * softcap
        if mask is not None:
            scores = scores + mask
        out = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype) @ value
    return out.reshape(tiles, heads, width, -1).transpose(1, 2)
