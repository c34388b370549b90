"""A step through a whole model without the model's Python around its layers.

Where all decoder layers are one stack, what is left of a model's forward is an embedding, a rotary embedding, a final
norm and the output layer. Calling just these modules and the stack saves what the model's own code costs: masks nobody
reads, a call a layer, containers for outputs. It is used only if it gives the bits that the model itself gives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cluster.engine.cpu.layers import ProbeCache, fused_logits, probe_ids
from cluster.engine.cpu.stack import LayerStack, PoolCache, StackedLayer


class DirectForward:
    """Runs a step's tokens through an optimised model of the usual build."""

    def __init__(self, model: PreTrainedModel, stack: LayerStack) -> None:
        """``stack`` holds all decoder layers of ``model``.

        Raises:
            AttributeError: a part has not the usual name.
        """
        base: Any = model.base_model
        self._callers = (model, base)
        self._stack = stack
        self._embed, self._head = base.get_input_embeddings(), model.get_output_embeddings()
        self._rotary, self._norm = base.rotary_emb, base.norm

    @property
    def applies(self) -> bool:
        """Whether nobody looks at what is left out, and the layers still are what they were."""
        watched = any(m._forward_hooks or m._forward_pre_hooks for m in self._callers)
        return not watched and self._stack.is_installed

    def __call__(self, ids: Tensor, positions: Tensor, keep: Tensor, cache: PoolCache) -> Tensor:
        """Logits [K, V].

        Args:
            ids, positions: int64 [1, T].
            keep: int64 [K], tokens whose logits are wanted.
            cache: the step's layout and the pools of every layer.
        """
        x = self._embed(ids)
        x = self._stack.run(x, self._rotary(x, position_ids=positions), cache)
        logits: Tensor = self._head(self._norm(x)[:, keep])[0]
        return logits


@torch.inference_mode()
def find_direct(model: PreTrainedModel) -> DirectForward | None:
    """The direct form of an optimised model, or None if the model is not built that way."""
    stack = _whole_stack(model)
    if stack is None:
        return None
    ids = probe_ids(model)
    tokens = ids.shape[1]
    positions, keep = torch.arange(tokens)[None], torch.arange(1, tokens)
    try:
        direct = DirectForward(model, stack)
        logits = direct(ids, positions, keep, ProbeCache(stack.layers, tokens, model.dtype))
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None
    return direct if torch.equal(logits, fused_logits(model, stack.layers, ids)[keep]) else None


def _whole_stack(model: PreTrainedModel) -> LayerStack | None:
    """The stack that all decoder layers of a model are in."""
    layers = [layer.forward for layer in getattr(model.base_model, "layers", [])]
    stacked = [layer for layer in layers if isinstance(layer, StackedLayer)]
    if not stacked or len(stacked) < len(layers) or len(stacked[0].stack.layers) != len(layers):
        return None
    return stacked[0].stack
