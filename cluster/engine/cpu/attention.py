"""Attention of packed rows: all sequences' new tokens side by side, each seeing its own cache and tree path.

A query's result has the same bits whatever is computed beside it, on however many threads, and whether the
tokens before it were committed long ago or belong to the tree of the same step (the kernel walks a query's
keys in order of position, in blocks that begin at fixed positions; see native/attention.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref

import numpy as np
import torch
from torch import Tensor

from cluster.engine.cpu.kernels import DTYPE_CODES, AttentionCall, Kernels, StepPlan, load_kernels


class TreeStep:
    """The layout of one step, validated and worked out once for all of a model's layers.

    Sequence s owns pool rows from ``starts[s]`` on: its ``lengths[s]`` committed tokens, which have the
    positions 0, 1, ..., then this step's ``widths[s]`` tokens. The step's tokens of all sequences, one
    sequence after the other, are the rows of the tensors given to ``attend``.
    """

    def __init__(
        self,
        starts: Sequence[int] | np.ndarray,
        lengths: Sequence[int] | np.ndarray,
        widths: Sequence[int] | np.ndarray,
        ancestors: Sequence[np.ndarray | None] | None = None,
    ) -> None:
        """Lay out a step.

        Args:
            starts: int64 [S], first pool row of each sequence.
            lengths: int64 [S], committed tokens.
            widths: int64 [S], tokens of this step.
            ancestors: for each sequence None (its tokens are one chain) or bool [W, W], row i marking the
                ancestors-or-self of node i, parents before children. None if all are chains.

        Raises:
            ValueError: the arrays do not fit together, or a relation is not that of a tree.
            RuntimeError: the kernels are not available.
        """
        kernels = load_kernels()
        if kernels is None:
            raise RuntimeError("the CPU kernels are not available in this process; check available() first")
        self._kernels: Kernels = kernels
        self.starts, self.lengths, self.widths = (
            np.ascontiguousarray(a, dtype=np.int64) for a in (starts, lengths, widths)
        )
        self._check_layout()
        self.tokens = int(self.widths.sum())
        self.rows_needed = int((self.starts + self.lengths + self.widths).max(initial=0))
        self.first = np.cumsum(self.widths) - self.widths
        flat, offsets = _flatten(ancestors, self.widths)
        self._trunk, self._depth = (np.empty(self.tokens, np.int32) for _ in range(2))
        self._tail = np.empty(self.tokens, np.int64)
        self._nodes = np.empty(0 if flat is None else len(flat), np.int32)
        self.plan = StepPlan(
            len(self.starts),
            self.tokens,
            *(
                array.ctypes.data
                for array in (
                    self.starts, self.lengths, self.widths, self.first,
                    self._trunk, self._depth, self._tail, self._nodes,
                )
            ),
        )  # fmt: skip
        bad = kernels.plan(
            self.plan,
            None if flat is None else flat.ctypes.data,
            None if flat is None else offsets.ctypes.data,
        )
        if bad >= 0:
            raise ValueError(f"ancestors of sequence {bad} are not those of a tree with parents before children")

    def _check_layout(self) -> None:
        arrays = (self.starts, self.lengths, self.widths)
        if any(a.ndim != 1 or a.shape != self.starts.shape for a in arrays):
            raise ValueError("starts, lengths and widths must be one-dimensional and of one length")
        if any((a < 0).any() for a in arrays):
            raise ValueError("starts, lengths and widths must not be negative")

    def positions(self) -> np.ndarray:
        """int64 [T]: absolute position of every token of the step."""
        return np.repeat(self.lengths, self.widths) + self._depth

    def rows(self) -> np.ndarray:
        """int64 [T]: pool row of every token of the step."""
        return np.repeat(self.starts + self.lengths - self.first, self.widths) + np.arange(self.tokens)

    def attend(
        self,
        query: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        new_keys: Tensor | None = None,
        new_values: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attention of the step's tokens in one layer.

        Args:
            query: [T, H, Dk]; any strides with a contiguous last dimension, as for all tensors but ``out``.
            k_pool: [Hkv, N, Dk]; query heads h * H/Hkv ... share key-value head h.
            v_pool: [Hkv, N, Dv].
            scale: factor of the scores.
            window: see only keys less than this many positions back; None: all.
            softcap: bound scores to ±softcap by a tanh; None: do not.
            new_keys, new_values: [T, Hkv, Dk] and [T, Hkv, Dv] of the step's tokens, stored in the pool
                first; None if they are there already.
            out: [T, H, Dv], contiguous, to write to.

        Returns:
            [T, H, Dv] in the dtype of the inputs (float32, bfloat16 or float16); float32 sums inside.
        """
        tokens, heads, key_dim = query.shape
        kv_heads, rows, value_dim = v_pool.shape
        if out is None:
            out = torch.empty((tokens, heads, value_dim), dtype=query.dtype)
        code = DTYPE_CODES.get(query.dtype)
        if (
            code is None
            or not query.dtype == k_pool.dtype == v_pool.dtype == out.dtype
            or k_pool.shape != (kv_heads, rows, key_dim)
            or tokens != self.tokens
            or rows < self.rows_needed
            or heads % kv_heads
            or out.shape != (tokens, heads, value_dim)
            or not out.is_contiguous()
        ):
            raise ValueError(
                f"attention over {self.tokens} tokens and {self.rows_needed} pool rows got query "
                f"{list(query.shape)} {query.dtype}, keys {list(k_pool.shape)} {k_pool.dtype}, values "
                f"{list(v_pool.shape)} {v_pool.dtype}, out {list(out.shape)} {out.dtype}"
            )
        call = AttentionCall(
            *_strides(query),
            *_strides(k_pool),
            *_strides(v_pool),
            *_new(new_keys, (tokens, kv_heads, key_dim), query.dtype),
            *_new(new_values, (tokens, kv_heads, value_dim), query.dtype),
            out.data_ptr(), heads * value_dim, heads, kv_heads, key_dim, value_dim,
            window or 0, scale, softcap or 0.0, code,
        )  # fmt: skip
        self._kernels.attention(byref(call), byref(self.plan), torch.get_num_threads())
        return out


def tree_attention(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    starts: Sequence[int] | np.ndarray,
    lengths: Sequence[int] | np.ndarray,
    widths: Sequence[int] | np.ndarray,
    ancestors: Sequence[np.ndarray | None] | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``TreeStep(...).attend(...)`` for a single call; with several layers, make the TreeStep once."""
    step = TreeStep(starts, lengths, widths, ancestors)
    return step.attend(query, k_pool, v_pool, scale=scale, window=window, softcap=softcap, out=out)


def _flatten(ancestors: Sequence[np.ndarray | None] | None, widths: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
    """Relations one after the other (uint8), and where each begins (-1: a chain)."""
    offsets = np.full(len(widths), -1, np.int64)
    if ancestors is None:
        return None, offsets
    if len(ancestors) != len(widths):
        raise ValueError(f"got ancestors of {len(ancestors)} sequences for {len(widths)}")
    parts, used = [], 0
    for s, relation in enumerate(ancestors):
        if relation is None:
            continue
        if relation.shape != (widths[s], widths[s]):
            raise ValueError(f"ancestors of sequence {s} are {relation.shape}, its width is {widths[s]}")
        parts.append(np.ascontiguousarray(relation, dtype=np.bool_).reshape(-1).view(np.uint8))
        offsets[s] = used
        used += parts[-1].size
    return (np.concatenate(parts) if parts else None), offsets


def _strides(tensor: Tensor) -> tuple[int, int, int]:
    first, second, last = tensor.stride()
    if last != 1:
        raise ValueError("the last dimension of the tensors of an attention call must be contiguous")
    return tensor.data_ptr(), first, second


def _new(tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int | None, int, int]:
    if tensor is None:
        return None, 0, 0
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(f"new keys or values are {list(tensor.shape)} {tensor.dtype}, not {list(shape)} {dtype}")
    return _strides(tensor)
