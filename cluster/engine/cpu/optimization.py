"""Makes a loaded Hugging Face model fast on CPU, in place and reversibly.

The model object stays what it is: same class, same modules, same call. What changes is what its layers run on,
and where their weights live.

Memory: a linear layer's weight is kept once, packed; the parameter that held it becomes a placeholder of the
same shape that owns no memory and reads as NaN, so a use that bypasses the layer cannot go unnoticed. A
weight that something else uses as well (an embedding table tied to the output layer) is kept in both forms.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cluster.engine.cpu.kernels import DTYPE_CODES, Kernels, load_kernels
from cluster.engine.cpu.layers import (
    LayerParts,
    NotFusable,
    Observation,
    PackedParts,
    check,
    describe,
    fused_logits,
    observe,
    probe_ids,
)
from cluster.engine.cpu.linear import FastLinear, InferenceOnlyError, pack_linear
from cluster.engine.cpu.stack import FusedLayer, LayerStack, StackedLayer

logger = logging.getLogger(__name__)

# Largest accepted ||optimised - original|| / ||original|| over the probe's logits. Roundings of another order
# of summation pass, a layer computed wrongly does not.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}


@dataclass
class Optimization:
    """What was done to a model, and the way back. Usable as a context manager that undoes it at the end.

    Attributes:
        packed: linear layers that run on packed weights.
        fused: decoder layers that run as one kernel when the model is called with a ``PoolCache``.
        not_fused: why the others do not, one reason for each kind of layer.
        batch_invariant: whether the linear layers give a row the same bits whatever rows are computed with it.
        logits_error: relative difference of the logits to the unoptimised model's on a short random input.
    """

    packed: int = 0
    fused: int = 0
    not_fused: set[str] = field(default_factory=set)
    batch_invariant: bool = True
    logits_error: float = 0.0
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Restore the model bit for bit; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Optimization:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


@torch.inference_mode()
def optimize(model: PreTrainedModel) -> Optimization:
    """Optimise ``model`` (in eval mode, on CPU) for inference, in place.

    The logits of a short random input are compared before and after; should they differ by more than
    rounding, all is undone and a warning says so. A decoder layer is fused only if the fused form gives the
    layer's own outputs.

    Args:
        model: a causal language model; linear layers of float32, bfloat16 or float16 are packed.

    Returns:
        The handle that undoes it.
    """
    ids = probe_ids(model)
    before = _logits(model, ids)
    work = _Optimizer(model)
    try:
        work.pack_layers()
        work.pack_rest()
        work.done.logits_error = _relative_error(_logits(model, ids), before)
        work.fuse_layers(ids, before)
    except BaseException:
        work.done.undo()
        raise
    if work.done.logits_error <= _TOLERANCE.get(before.dtype, 1e-3):
        return work.done
    logger.warning(
        "the optimised model's logits differ from the original's by %.2g (relative); running unoptimised",
        work.done.logits_error,
    )
    work.done.undo()
    return Optimization(logits_error=work.done.logits_error)


class _Optimizer:
    """The steps of ``optimize`` and what they share."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.done = Optimization()
        self._model = model
        self._layers: list[PackedParts] = []
        self._fused: list[FusedLayer] = []
        uses = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
        self._shared = {key for key, count in uses.items() if count > 1}

    def pack_layers(self) -> None:
        """Pack decoder layers of the usual build as their fused form needs them."""
        kernels = load_kernels()
        if kernels is None:
            return
        for layer in self._model.modules():
            parts = LayerParts.of(layer)
            if parts is None or not all(_is_plain(linear) for linear in parts.linears()):
                continue
            packed = PackedParts.of(kernels, parts)
            self._layers.append(packed)
            for linear, fast in zip(parts.linears(), packed.linears(), strict=True):
                self._replace(linear, fast)

    def pack_rest(self) -> None:
        """Pack every other linear layer on its own."""
        for module in self._model.modules():
            if not isinstance(module, nn.Linear) or not _is_plain(module):
                continue
            fast = pack_linear(module.weight, module.bias)
            if fast is None:
                self.done.batch_invariant = False
            else:
                self._replace(module, fast)

    def fuse_layers(self, ids: Tensor, logits: Tensor) -> None:
        """Fuse the packed decoder layers that turn out to be what the fused kernel computes.

        Args:
            ids: a short input.
            logits: what the model answered before it was touched.
        """
        kernels = load_kernels()
        if kernels is None or not self._layers:
            return
        seen = observe(self._model, [packed.parts.layer for packed in self._layers], ids)
        stack: list[FusedLayer] = []
        previous = 0
        for packed in self._layers:
            fused = self._fuse(kernels, packed, seen.get(packed.parts.layer))
            now = seen.get(packed.parts.layer)
            if stack and (fused is None or now is None or now.input.data_ptr() != previous):
                self._install(kernels, stack)
                stack = []
            if fused is not None and now is not None:
                stack.append(fused)
                previous = now.output.data_ptr()
        if stack:
            self._install(kernels, stack)
        if not self._fused:
            return
        error = _relative_error(fused_logits(self._model, self._fused, ids), logits)
        if error <= _TOLERANCE.get(logits.dtype, 1e-3):
            self.done.logits_error = max(error, self.done.logits_error)
            return
        self.done.not_fused.add(f"with fused layers, the model's logits differ by {error:.2g}")
        while self.done.fused:
            self.done._undo.pop()()
            self.done.fused -= 1

    def _fuse(self, kernels: Kernels, packed: PackedParts, seen: Observation | None) -> FusedLayer | None:
        try:
            if seen is None:
                raise NotFusable("the layer is not called in the usual way")
            fused = describe(packed, seen)
            check(kernels, fused, seen)
        except NotFusable as reason:
            self.done.not_fused.add(str(reason))
            return None
        return fused

    def _install(self, kernels: Kernels, layers: list[FusedLayer]) -> None:
        stack = LayerStack(kernels, layers)
        self._fused += layers
        for position, layer in enumerate(layers):
            module: Any = layer.module
            module.forward = StackedLayer(stack, position, module.forward)
            self.done._undo.append(partial(delattr, module, "forward"))
            self.done.fused += 1

    def _replace(self, module: nn.Linear, fast: FastLinear) -> None:
        """Let ``fast`` compute the layer, and free its weight unless something else uses it."""
        weight = module.weight
        module.forward = fast  # type: ignore[method-assign, assignment]
        self.done._undo.append(partial(delattr, module, "forward"))
        self.done.packed += 1
        self.done.batch_invariant &= fast.batch_invariant
        if id(weight) in self._shared:
            return
        guard = module.register_state_dict_pre_hook(_refuse_state_dict)
        weight.data = torch.full((), torch.nan, dtype=weight.dtype).expand(weight.shape)

        def restore() -> None:
            weight.data = fast.unpack()
            guard.remove()

        self.done._undo.append(restore)


def _is_plain(module: nn.Linear) -> bool:
    """A linear layer that is just that: on CPU, without hooks, subclasses or a forward of somebody else's."""
    return (
        type(module) is nn.Linear
        and "forward" not in module.__dict__
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and module.weight.device.type == "cpu"
        and module.weight.dtype in DTYPE_CODES
    )


def _refuse_state_dict(*_: object) -> None:
    raise InferenceOnlyError("the weights of this model are packed: call undo() on the optimisation before saving it")


def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits


def _relative_error(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.double(), theirs.double()
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-30))
