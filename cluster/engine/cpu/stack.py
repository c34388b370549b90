"""Fused decoder layers at work: what replaces the forward of a model's layers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import POINTER, addressof, c_void_p, pointer, sizeof
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from cluster.engine.cpu.attention import TreeStep
from cluster.engine.cpu.kernels import DTYPE_CODES, Kernels, LayerCall, LayerFields


class PoolCache(Protocol):
    """What a cache offers so that fused layers can run: the step's layout, and the pools of every layer."""

    @property
    def tree_step(self) -> TreeStep | None:
        """The step that the model is called for; None: this time the layers' own code is to run."""

    def pools(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys [Hkv, N, Dk] and values [Hkv, N, Dv] of a layer, which stores the step's tokens there itself."""


@dataclass
class FusedLayer:
    """What the kernel needs of one decoder layer."""

    module: nn.Module
    index: int  # the layer's number in the cache
    fields: LayerFields
    memory: list[Any]  # owners of the memory that the fields point to


class _Pass(threading.local):
    """One thread's way through a stack: the arguments of its layers, noted one by one."""

    def __init__(self, count: int) -> None:
        self.calls = (LayerCall * count)()
        self.each = list(self.calls)
        # The pools seen last, which an engine keeps from step to step; weakly, so that they end with the engine.
        self.pools: list[tuple[ReferenceType[Tensor], ReferenceType[Tensor]] | None] = [None] * count
        self.rows = [0] * count  # of the pools
        self.deferred = False
        self.x: Tensor | None = None
        self.rotary: tuple[Tensor, Tensor] | None = None
        self.addresses = (0, 0)  # of the rotary embeddings
        self.kept: list[Tensor] = []  # tensors that must live until the layers have run

    def forget(self) -> None:
        """Let go of a pass's tensors."""
        self.x = self.rotary = None
        self.kept.clear()


@dataclass(frozen=True, slots=True)
class StackedLayer:
    """What replaces ``own``, the forward of the layer at ``position`` of a stack."""

    stack: LayerStack
    position: int
    own: Callable[..., Tensor]

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        cache = kwargs.get("cache")
        if cache is None:
            cache = kwargs.get("past_key_values")
        step = getattr(cache, "tree_step", None)
        if step is None or cache is None or args:
            return self.own(hidden_states, *args, **kwargs)
        pools = cache.pools(self.stack.layers[self.position].index)
        return self.stack.put(self.position, step, hidden_states, kwargs["position_embeddings"], pools)


class LayerStack:
    """Consecutive fused layers, each of which gets what the one before it returns, and nobody else looks at it.

    So they can run as one call: every layer but the last only notes its arguments and hands its input on, the
    last one runs them all. If somebody does look, through hooks, the layers run one by one.
    """

    def __init__(self, kernels: Kernels, layers: list[FusedLayer]) -> None:
        """``layers`` in the order in which the model calls them, all of one dtype and hidden size."""
        self.layers = layers
        self._kernels = kernels
        self._fields = (POINTER(LayerFields) * len(layers))(*(pointer(layer.fields) for layer in layers))
        self._pass = _Pass(len(layers))

    @property
    def is_installed(self) -> bool:
        """Whether the model's layers still run on this stack."""
        return all(isinstance(layer.module.__dict__.get("forward"), StackedLayer) for layer in self.layers)

    def run(self, x: Tensor, rotary: tuple[Tensor, Tensor], cache: PoolCache) -> Tensor:
        """All layers over the step's tokens; arguments and result as those of ``put``."""
        step = cache.tree_step
        assert step is not None
        for position, layer in enumerate(self.layers):
            x = self.put(position, step, x, rotary, cache.pools(layer.index))
        return x

    def put(
        self, position: int, step: TreeStep, x: Tensor, rotary: tuple[Tensor, Tensor], pools: tuple[Tensor, Tensor]
    ) -> Tensor:
        """The layer at ``position`` over the step's tokens.

        Args:
            position: in the stack; layers are put in order.
            step: the step's layout.
            x: [1, T, hidden].
            rotary: cosines and sines [1, T, Dk].
            pools: keys [Hkv, N, Dk] and values [Hkv, N, Dv]; the step's tokens are stored by the layer.

        Returns:
            [1, T, hidden]; x itself where the layer's work is left to the last one.
        """
        now = self._pass
        if position == 0:
            self._begin(now, step, x)
        elif not now.deferred:
            now.x = x.contiguous()
        elif x is not now.x:
            raise RuntimeError("hidden states were changed between two layers of an optimised model")
        if rotary is not now.rotary:
            self._take_rotary(now, step, rotary)
        known = now.pools[position]
        if known is None or known[0]() is not pools[0] or known[1]() is not pools[1]:
            self._take_pools(now, position, pools)
        if now.rows[position] < step.rows_needed:
            raise ValueError(f"the step needs {step.rows_needed} pool rows, there are {now.rows[position]}")
        call = now.each[position]
        call.cosines, call.sines = now.addresses
        if not now.deferred:
            return self._run(now, step, position, position + 1)
        return x if position + 1 < len(self.layers) else self._run(now, step, 0, position + 1)

    def _begin(self, now: _Pass, step: TreeStep, x: Tensor) -> None:
        fields = self.layers[0].fields
        if x.shape != (1, step.tokens, fields.hidden) or DTYPE_CODES.get(x.dtype) != fields.dtype:
            raise ValueError(
                f"a layer of {fields.hidden} features over {step.tokens} tokens got {list(x.shape)} {x.dtype}"
            )
        now.forget()
        watched = (layer.module._forward_hooks or layer.module._forward_pre_hooks for layer in self.layers)
        now.deferred = x.is_contiguous() and not any(watched)
        now.x = x.contiguous()

    def _take_rotary(self, now: _Pass, step: TreeStep, rotary: tuple[Tensor, Tensor]) -> None:
        fields = self.layers[0].fields
        for part in rotary:
            if part.shape != (1, step.tokens, fields.key_dim) or DTYPE_CODES.get(part.dtype) != fields.dtype:
                raise ValueError(
                    f"the rotary embedding of {step.tokens} tokens and {fields.key_dim} values a head is "
                    f"{list(part.shape)} {part.dtype}"
                )
        cosines, sines = (part.contiguous() for part in rotary)
        now.rotary, now.addresses = rotary, (cosines.data_ptr(), sines.data_ptr())
        now.kept += [cosines, sines]

    def _take_pools(self, now: _Pass, position: int, pools: tuple[Tensor, Tensor]) -> None:
        fields, call = self.layers[position].fields, now.each[position]
        keys, values = pools
        if (
            keys.shape[::2] != (fields.kv_heads, fields.key_dim)
            or values.shape[::2] != (fields.kv_heads, fields.value_dim)
            or not DTYPE_CODES.get(keys.dtype) == DTYPE_CODES.get(values.dtype) == fields.dtype
            or not keys.stride(2) == values.stride(2) == 1
        ):
            raise ValueError(
                f"pools of {fields.kv_heads} heads of {fields.key_dim} and {fields.value_dim} values are "
                f"{list(keys.shape)} {keys.dtype} and {list(values.shape)} {values.dtype}"
            )
        call.keys, call.keys_head, call.keys_row = keys.data_ptr(), keys.stride(0), keys.stride(1)
        call.values, call.values_head, call.values_row = values.data_ptr(), values.stride(0), values.stride(1)
        now.pools[position] = ref(keys), ref(values)
        now.rows[position] = min(keys.shape[1], values.shape[1])

    def _run(self, now: _Pass, step: TreeStep, begin: int, end: int) -> Tensor:
        """Run layers [begin, end) on ``now.x``."""
        assert now.x is not None
        out = torch.empty_like(now.x)
        address = out.data_ptr()
        for call in now.each[begin:end]:
            call.x = call.y = address
        now.each[begin].x = now.x.data_ptr()
        self._kernels.layers(
            addressof(self._fields) + begin * sizeof(c_void_p),
            addressof(now.each[begin]),
            end - begin,
            step.plan,
            torch.get_num_threads(),
        )
        if end == len(self.layers):
            now.forget()
        return out
