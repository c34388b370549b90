"""Architectures that cannot be verified in a tree are refused before their weights are read."""

import pytest
from transformers import (
    BertConfig,
    BloomConfig,
    Gemma3TextConfig,
    JambaConfig,
    Lfm2MoeConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
    T5Config,
    ViTConfig,
)

from cluster.models import ModelConfig, ModelError, load_model
from cluster.models.support import check_supported

REFUSED = [
    (T5Config(), "encoder-decoder"),
    (MambaConfig(num_hidden_layers=1), "linear_attention|state"),
    (Mamba2Config(num_hidden_layers=1), "linear_attention|state"),
    (JambaConfig(), "linear_attention|state"),
    (Qwen3NextConfig(num_hidden_layers=4), "layers of type linear_attention"),
    (RecurrentGemmaConfig(), "linear_attention|state"),
    (RwkvConfig(), "state"),
    (Lfm2MoeConfig(), "convolutional state"),
    (BloomConfig(), "attention function"),
    (BertConfig(), "bidirectional"),
    (ViTConfig(), "not a causal language model"),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=lambda value: getattr(value, "model_type", ""))
def test_refused_from_a_directory_that_has_no_weights(tmp_path, config, reason):
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"\({config.model_type}\) cannot be run here: .*({reason})"):
        load_model(ModelConfig(model=str(tmp_path)))


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(),
        MistralConfig(),
        Qwen2Config(),
        Qwen2Config(use_sliding_window=True, max_window_layers=2),
        Qwen3Config(),
        Gemma3TextConfig(),
    ],
    ids=lambda config: config.model_type,
)
def test_supported(config):
    check_supported(config, "a model")
