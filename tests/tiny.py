"""Tiny random models and a byte tokenizer, made in memory: the architectures are real, the weights are noise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from cluster.decoding.params import CORPUS_METHODS, METHODS
from cluster.models import LoadedModel

METHODS_ALONE = [m for m in METHODS if m not in CORPUS_METHODS]
STOP_ID = 256
VOCABULARY = 259

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": STOP_ID,
    "pad_token_id": STOP_ID,
}
_WINDOW = 11  # shorter than the tests' prompts, so that sliding windows slide
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE),
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen3": Qwen3Config(**_SHAPE),
    "mistral": MistralConfig(**_SHAPE, sliding_window=_WINDOW),
    "gemma2": Gemma2Config(**_SHAPE, sliding_window=_WINDOW, query_pre_attn_scalar=8, attn_logit_softcapping=2.0),
    "gemma3": Gemma3TextConfig(**_SHAPE, sliding_window=_WINDOW, query_pre_attn_scalar=8, layer_types=_LAYERS),
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0..255 are bytes, 256.. special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>"])
    template = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}<|assistant|>"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=template)


def tiny_model(architecture: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0) -> LoadedModel:
    """A random model of this architecture, ready for an engine."""
    torch.manual_seed(seed)
    config = CONFIGS[architecture]
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    return LoadedModel(
        f"tiny-{architecture}",
        model,
        byte_tokenizer(),
        frozenset({STOP_ID}),
        dtype,
        torch.device("cpu"),
        config.max_position_embeddings,
    )


def on_device(loaded: LoadedModel, device: str) -> LoadedModel:
    """The same model elsewhere."""
    return replace(loaded, model=nn.Module.to(loaded.model, device), device=torch.device(device))


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens with repetitions in them, as text has."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 24, (length,), generator=generator).tolist()
