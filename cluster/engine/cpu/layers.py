"""Finds the decoder layers that the kernels can run as one call, for engines that keep a pool of keys and values.

A layer is recognised by what it is made of (a gated MLP and rotary grouped-query attention, with root mean
square norms before and perhaps after each), not by its class, and what that leaves open is learnt from running
it: the arguments it gives to attention, the kind of its norms and its activation. Then the fused layer is run
on the inputs the model's own layer has just seen; it is used only if it gives the same outputs.

The fused layer takes over only when the model is called with a cache that offers the layout of a step
(``PoolCache``). Any other call, ``generate`` for instance, runs the layer's own code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from cluster.engine.cpu.attention import TreeStep
from cluster.engine.cpu.kernels import DTYPE_CODES, Kernels, LayerFields, NormFields
from cluster.engine.cpu.linear import PackedLinear, PackedWeights
from cluster.engine.cpu.stack import FusedLayer, LayerStack

_ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_PROBE_TOKENS = 12
# Largest accepted ||fused - own|| / ||own - input|| over a layer's outputs.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}


class NotFusable(Exception):
    """A layer is not what the fused kernel computes; says in what."""


@dataclass
class LayerParts:
    """A decoder layer taken apart by the usual names of its modules."""

    layer: nn.Module
    qkv: list[nn.Linear]
    out: nn.Linear
    gate_up: list[nn.Linear]
    down: nn.Linear

    @classmethod
    def of(cls, layer: nn.Module) -> LayerParts | None:
        """The parts of ``layer``, or None if it is not built that way."""
        if not _is_untouched(layer):
            return None
        attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
        found = [getattr(attention, name, None) for name in _ATTENTION_PROJECTIONS]
        found += [getattr(mlp, name, None) for name in _MLP_PROJECTIONS]
        linears = [p for p in found if isinstance(p, nn.Linear)]
        if len(linears) < len(found) or not hasattr(layer, "input_layernorm"):
            return None
        q, k, v, out, gate, up, down = linears
        if not q.in_features == k.in_features == v.in_features == out.out_features == gate.in_features:
            return None
        if gate.weight.shape != up.weight.shape or down.weight.shape != gate.weight.T.shape:
            return None
        return cls(layer, [q, k, v], out, [gate, up], down)

    def linears(self) -> list[nn.Linear]:
        """All projections."""
        return [*self.qkv, self.out, *self.gate_up, self.down]


def _is_untouched(layer: nn.Module) -> bool:
    """Nobody replaced the code of a layer or its parts, and nobody watches the parts through hooks."""
    parts = list(layer.modules())
    if any("forward" in part.__dict__ for part in parts):
        return False
    return not any(part._forward_hooks or part._forward_pre_hooks for part in parts[1:])


@dataclass
class PackedParts:
    """The weights of a layer as the fused kernel wants them."""

    parts: LayerParts
    qkv: PackedWeights
    out: PackedWeights
    gate_up: PackedWeights
    down: PackedWeights

    @classmethod
    def of(cls, kernels: Kernels, parts: LayerParts) -> PackedParts:
        """Pack the weights of ``parts``."""

        def pack(linears: list[nn.Linear], alternate: bool = False) -> PackedWeights:
            weights, biases = [p.weight for p in linears], [p.bias for p in linears]
            return PackedWeights(kernels, weights, biases, alternate=alternate)

        qkv, out = pack(parts.qkv), pack([parts.out])
        return cls(parts, qkv, out, pack(parts.gate_up, alternate=True), pack([parts.down]))

    def linears(self) -> list[PackedLinear]:
        """The projections in the order of ``LayerParts.linears``."""
        together = ((self.qkv, 3), (self.out, 1), (self.gate_up, 2), (self.down, 1))
        return [weights.linear(i) for weights, count in together for i in range(count)]


@dataclass
class Observation:
    """What one run of the model showed of a layer."""

    input: Tensor  # [T, hidden]
    output: Tensor
    cosines: Tensor  # [T, key_dim]
    sines: Tensor
    attention: dict[str, Any]  # arguments of its attention call


def observe(model: PreTrainedModel, layers: list[nn.Module], ids: Tensor) -> dict[nn.Module, Observation]:
    """Run ``ids`` [1, T] through the model and note what ``layers`` get, give and ask of attention."""
    seen: dict[nn.Module, Observation] = {}
    attention: dict[nn.Module, dict[str, Any]] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        embeddings = kwargs.get("position_embeddings")
        own = attention.get(getattr(module, "self_attn", module))
        if isinstance(output, Tensor) and isinstance(hidden, Tensor) and own and isinstance(embeddings, tuple):
            cosines, sines = (e[0].contiguous() for e in embeddings)
            seen[module] = Observation(hidden[0], output[0], cosines, sines, own)

    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        with _own_attention(model, attention):
            model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def fused_logits(model: PreTrainedModel, layers: list[FusedLayer], ids: Tensor) -> Tensor:
    """Logits [T, V] of ``ids`` [1, T], as an engine with a pool would get them from the optimised model."""
    with _own_attention(model, {}):
        cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        positions = torch.arange(ids.shape[1])[None]
        pools = {cache: ProbeCache(layers, ids.shape[1], model.dtype)}
        logits: Tensor = model(input_ids=ids, position_ids=positions, use_cache=True, **pools).logits[0]
    return logits


def probe_ids(model: PreTrainedModel) -> Tensor:
    """int64 [1, T]: a short input, the same in every call."""
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(embedding.shape[0], (1, _PROBE_TOKENS), generator=generator)


class ProbeCache:
    """The pools of a single short step."""

    def __init__(self, layers: list[FusedLayer], tokens: int, dtype: torch.dtype) -> None:
        self.tree_step = TreeStep([0], [0], [tokens])
        self._pools = {layer.index: _empty_pools(layer.fields, tokens, dtype) for layer in layers}

    def pools(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._pools[layer]

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """For layers that are not fused: the step's keys are all there are."""
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def _empty_pools(fields: LayerFields, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    keys, values = (torch.empty(fields.kv_heads, rows, dim, dtype=dtype) for dim in (fields.key_dim, fields.value_dim))
    return keys, values


@contextmanager
def _own_attention(model: PreTrainedModel, calls: dict[nn.Module, dict[str, Any]]) -> Iterator[None]:
    """Causal attention by our kernel, noting the arguments each module gives."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **arguments: Any
    ) -> tuple[Tensor, None]:
        given = {name: argument for name, argument in arguments.items() if argument is not None}
        calls[module] = given
        step = TreeStep([0], [0], [query.shape[2]])
        scale = given.get("scaling", query.shape[-1] ** -0.5)
        window, softcap = given.get("sliding_window"), given.get("softcap")
        q, k, v = query[0].transpose(0, 1), key[0].contiguous(), value[0].contiguous()
        return step.attend(q, k, v, scale=scale, window=window, softcap=softcap)[None], None

    config = model.config.get_text_config()
    before = config._attn_implementation
    AttentionInterface.register(_PROBE, attend)
    config._attn_implementation = _PROBE
    try:
        yield
    finally:
        config._attn_implementation = before


_PROBE = "logitspec_cpu_probe"


def describe(packed: PackedParts, seen: Observation) -> FusedLayer:
    """The fused form of a layer.

    Raises:
        NotFusable: the kernel cannot compute this layer.
    """
    parts = packed.parts
    layer: Any = parts.layer
    norms, index = _norms(layer), getattr(layer.self_attn, "layer_idx", None)
    if norms["input"] is None or norms["mlp_input"] is None:
        raise NotFusable("attention or MLP has no norm before it")
    if not isinstance(index, int):
        raise NotFusable("the layer has no index")
    hidden, dtype = parts.out.out_features, seen.input.dtype
    heads, kv_heads, key_dim, value_dim = _head_sizes(parts, seen)
    kept: list[Tensor] = []
    fields = LayerFields(
        hidden, parts.down.in_features, heads, kv_heads, key_dim, value_dim,
        seen.attention.get("sliding_window", 0),
        seen.attention.get("scaling", key_dim**-0.5),
        seen.attention.get("softcap", 0.0),
        DTYPE_CODES[dtype],
        _activation(layer.mlp.act_fn, dtype),
        packed.qkv.joint(), packed.out.single(0), packed.gate_up.joint(), packed.down.single(0),
        *(_norm(norm, key_dim if name in ("query", "key") else hidden, dtype, kept) for name, norm in norms.items()),
    )  # fmt: skip
    return FusedLayer(layer, index, fields, [packed, kept])


def check(kernels: Kernels, fused: FusedLayer, seen: Observation) -> None:
    """Compare the fused layer's outputs with those the layer itself gave.

    Raises:
        NotFusable: they differ by more than rounding.
    """
    tokens, dtype = len(seen.input), seen.input.dtype
    pools = _empty_pools(fused.fields, tokens, dtype)
    step = TreeStep([0], [0], [tokens])
    stack = LayerStack(kernels, [fused])
    out = stack.put(0, step, seen.input[None], (seen.cosines[None], seen.sines[None]), pools)[0]
    change = (seen.output.double() - seen.input.double()).norm().clamp_min(1e-30)
    error = float((out.double() - seen.output.double()).norm() / change)
    if not error <= _TOLERANCE[dtype]:
        raise NotFusable(f"the fused layer's outputs differ by {error:.2g}")


def _head_sizes(parts: LayerParts, seen: Observation) -> tuple[int, int, int, int]:
    """Query heads, key-value heads, sizes of keys and values."""
    query, key, value = (linear.out_features for linear in parts.qkv)
    key_dim = seen.cosines.shape[-1]
    heads, kv_heads = query // key_dim, key // key_dim
    if key_dim % 2 or not kv_heads or heads % kv_heads or (query, key) != (heads * key_dim, kv_heads * key_dim):
        raise NotFusable("the rotary embedding does not span the heads")
    value_dim = value // kv_heads
    if parts.out.in_features != heads * value_dim:
        raise NotFusable("attention's outputs are not the heads side by side")
    return heads, kv_heads, key_dim, value_dim


def _norms(layer: Any) -> dict[str, Any]:
    """A layer's norms by their place in ``struct Layer``; what "post attention" means depends on their number."""
    before_mlp = getattr(layer, "pre_feedforward_layernorm", None)
    after_attention = getattr(layer, "post_attention_layernorm", None)
    return {
        "input": layer.input_layernorm,
        "query": getattr(layer.self_attn, "q_norm", None),
        "key": getattr(layer.self_attn, "k_norm", None),
        "attention_post": after_attention if before_mlp else None,
        "mlp_input": before_mlp or after_attention,
        "mlp_post": getattr(layer, "post_feedforward_layernorm", None),
    }


def _norm(norm: nn.Module | None, size: int, dtype: torch.dtype, kept: list[Tensor]) -> NormFields:
    """The kernel's description of a root mean square norm, found by trying what it may be."""
    if norm is None:
        return NormFields(None, 0.0, 0)
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, Tensor) or weight.shape != (size,) or not isinstance(eps, float):
        raise NotFusable(f"{type(norm).__name__} is not a root mean square norm over {size} values")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, size, generator=generator).to(dtype)
    wanted = norm(x).double()
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    best = None
    for factor, late in ((weight, 0), (1.0 + weight.float(), 1), (weight.float(), 1)):
        ours = (factor.float() * (normed if late else normed.to(dtype).float())).to(dtype).double()
        error = float((ours - wanted).norm() / wanted.norm().clamp_min(1e-30))
        if best is None or error < best[0]:
            best = error, factor.float().contiguous(), late
    assert best is not None
    if not best[0] <= torch.finfo(dtype).eps:
        raise NotFusable(f"{type(norm).__name__} is not a root mean square norm")
    kept.append(best[1])
    return NormFields(best[1].data_ptr(), eps, best[2])


def _activation(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> int:
    """The kernel's code of an activation function, found by trying it."""
    x = torch.linspace(-6, 6, 97).to(dtype)
    known = (nn.functional.silu(x), nn.functional.gelu(x, approximate="tanh"))
    for code, values in enumerate(known):
        if torch.allclose(function(x).float(), values.float(), rtol=1e-5, atol=1e-6):
            return code
    raise NotFusable("the activation function is not one the kernel knows")
