"""Which architectures the engine can run, judged by configuration and class before any weight is read.

Verifying a tree of drafts means computing several continuations of one prefix in the same forward pass and
keeping one of them. That works where the only state is a KV cache with one entry a token. A recurrent or
convolutional state has already absorbed the rejected drafts and cannot be cut back.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from cluster.models.errors import ModelError

SUPPORTED_LAYERS = frozenset({"full_attention", "sliding_attention"})

# Configuration fields that only models with a recurrent or convolutional state have.
_STATE_FIELDS = (
    "ssm_cfg",
    "mamba_d_state",
    "state_size",
    "conv_L_cache",
    "lru_width",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
)


def check_supported(config: PretrainedConfig, name: str, *, trust_remote_code: bool = False) -> None:
    """Raise ModelError, with the reason, for a model whose drafts cannot be verified in a tree."""
    reason = _refusal(config, trust_remote_code)
    if reason:
        raise ModelError(f"{name} ({config.model_type}) cannot be run here: {reason}")


def _refusal(config: PretrainedConfig, trust_remote_code: bool) -> str | None:
    if config.is_encoder_decoder:
        return "it is an encoder-decoder model; only decoder-only causal language models are supported"
    text = config.get_text_config(decoder=True)
    model_class = _causal_lm_class(config, trust_remote_code)
    if model_class is None:
        return "it is not a causal language model"
    return _state_refusal(text, model_class) or _attention_refusal(text, model_class)


def _state_refusal(text: PretrainedConfig, model_class: type[PreTrainedModel]) -> str | None:
    consequence = "which cannot be cut back to the accepted part of a draft tree"
    odd = sorted(set(getattr(text, "layer_types", None) or ()) - SUPPORTED_LAYERS)
    if odd:
        return f"it has layers of type {', '.join(odd)}, {consequence}"
    field = next((field for field in _STATE_FIELDS if getattr(text, field, None) is not None), None)
    if field or getattr(model_class, "_is_stateful", False):
        return f"it keeps a recurrent or convolutional state, {consequence}"
    return None


def _attention_refusal(text: PretrainedConfig, model_class: type[PreTrainedModel]) -> str | None:
    if getattr(text, "is_decoder", True) is False:
        return "its attention is bidirectional; only decoder-only causal language models are supported"
    if not getattr(model_class, "_supports_attention_backend", False):
        return (
            f"{model_class.__name__} does not take an attention function from outside, which the draft tree "
            "needs; newer versions of transformers may allow it"
        )
    return None


def _causal_lm_class(config: PretrainedConfig, trust_remote_code: bool) -> type[PreTrainedModel] | None:
    """The class AutoModelForCausalLM would make, or None where there is none for this configuration."""
    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        with torch.device("meta"):  # no memory, no weights
            return type(AutoModelForCausalLM.from_config(config, trust_remote_code=True))
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return found[0] if isinstance(found, (list, tuple)) else found
