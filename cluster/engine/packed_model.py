"""An unmodified causal LM, called on a packed row with our attention and cache in place of its own."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from transformers import PreTrainedModel

from cluster.engine.attention import Layout, PackedAttention


class PackedModel:
    """Runs a model's public forward on the tokens of a step.

    The model's attention implementation is switched to ours meanwhile and restored afterwards, so the same object
    keeps working with ``generate``.
    """

    def __init__(self, model: PreTrainedModel, attention: PackedAttention) -> None:
        self._model = model
        self._attention = attention
        names = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"

    def __call__(self, ids: Tensor, positions: Tensor, keep: Tensor, layout: Layout) -> Tensor:
        """Logits [K, V] in the model's dtype.

        Args:
            ids, positions: int64 [1, T].
            keep: int64 [K], tokens whose logits are wanted.
            layout: where keys and values go, and what each token attends to.
        """
        with self._packed_attention(layout):
            output = self._model(
                input_ids=ids,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=keep,
                **{self._cache_argument: self._attention},
            )
        logits: Tensor = output.logits[0]
        return logits

    @contextmanager
    def _packed_attention(self, layout: Layout) -> Iterator[None]:
        self._attention.layout = layout
        config = self._model.config.get_text_config()
        before = config._attn_implementation
        config._attn_implementation = self._attention.name
        try:
            yield
        finally:
            config._attn_implementation = before
            self._attention.layout = None
