"""GGUF files: converted exactly, and refused where they are damaged or cannot be taken over."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cluster.models import ModelConfig, ModelError, load_model, load_tokenizer, tokenizer_fingerprint
from cluster.models.gguf_convert import checksum
from cluster.models.gguf_header import read_header
from tests.models.conftest import SPECIAL, vocabulary, write_gguf

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def load(path: Path):
    return load_model(ModelConfig(model=str(path), dtype="float32", device="cpu"))


def logits(model, length=12):
    ids = torch.arange(length).unsqueeze(0) * 7 % len(vocabulary())
    with torch.inference_mode():
        return model(ids).logits


def test_converted_model_computes_the_same(own_cache, tiny_gguf, tiny_llama):
    loaded = load(tiny_gguf)
    torch.testing.assert_close(logits(loaded.model), logits(tiny_llama), rtol=0, atol=1e-6)
    assert (loaded.name, loaded.max_model_len) == ("tiny", 128)
    assert loaded.stop_ids == {0, 2}
    assert loaded.model.config.tie_word_embeddings
    assert not hasattr(loaded.model.config, "quantization_config")


def test_tokenizer_alone_needs_no_weights_and_is_the_same(own_cache, tiny_gguf):
    alone = load_tokenizer(str(tiny_gguf))
    assert not list(own_cache.glob("*-model-*"))
    assert tokenizer_fingerprint(alone) == tokenizer_fingerprint(load(tiny_gguf).tokenizer)


def test_digits_are_split_where_the_pre_tokenizer_says_so(own_cache, tmp_path, tiny_llama, tiny_gguf):
    names = vocabulary()
    single = load_tokenizer(str(tiny_gguf))
    assert [names[index] for index in single.encode("hell 12")] == ["hell", "Ġ", "1", "2"]
    like_gpt2 = load_tokenizer(str(write_gguf(tmp_path / "other.gguf", tiny_llama, pre="gpt-2")))
    assert [names[index] for index in like_gpt2.encode("hell12")] == ["hell", "12"]


def test_llama3_tokenizer_begins_with_bos(own_cache, tmp_path, tiny_llama):
    path = write_gguf(tmp_path / "llama3.gguf", tiny_llama, pre="llama-bpe")
    loaded = load(path)
    for tokenizer in (load_tokenizer(str(path)), loaded.tokenizer):
        assert tokenizer.encode("he") == [1, vocabulary().index("he")]
        assert tokenizer.encode("he", add_special_tokens=False) == [vocabulary().index("he")]


def test_special_tokens_are_whole(own_cache, tiny_gguf):
    tokenizer = load_tokenizer(str(tiny_gguf))
    ids = tokenizer.encode("".join(SPECIAL) + "he")
    assert ids == [0, 1, 2, vocabulary().index("he")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "he"


def test_unknown_pre_tokenizer_is_refused(own_cache, tmp_path, tiny_llama):
    path = write_gguf(tmp_path / "odd.gguf", tiny_llama, pre="never-heard-of")
    with pytest.raises(ModelError, match="never-heard-of"):
        load_tokenizer(str(path))
    with pytest.raises(ModelError, match="never-heard-of"):
        load(path)


def llama3_factors(head_dim: int) -> np.ndarray:
    """What llama.cpp stores for Llama 3: plain frequencies over scaled ones, both by transformers."""

    def frequencies(parameters):
        config = LlamaConfig(head_dim=head_dim, max_position_embeddings=131072, rope_parameters=parameters)
        return ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]

    return (frequencies(LLAMA3 | {"factor": 1.0}) / frequencies(LLAMA3)).float().numpy()


def test_llama3_frequency_factors_become_rope_parameters(own_cache, tmp_path, tiny_llama):
    config: Any = LlamaConfig(**tiny_llama.config.to_dict() | {"rope_parameters": dict(LLAMA3), "head_dim": 8})
    model = LlamaForCausalLM(config).eval()
    factors = llama3_factors(config.head_dim)
    loaded = load(write_gguf(tmp_path / "llama3.gguf", model, rope_freqs__weight=factors))
    assert loaded.model.config.rope_parameters == LLAMA3
    torch.testing.assert_close(logits(loaded.model, 100), logits(model, 100), rtol=0, atol=1e-6)


def test_other_frequency_factors_are_refused(own_cache, tmp_path, tiny_llama):
    factors = np.linspace(1, 3, 4, dtype=np.float32)
    with pytest.raises(ModelError, match="frequency factors"):
        load(write_gguf(tmp_path / "odd.gguf", tiny_llama, rope_freqs__weight=factors))


def test_header_tells_where_tensors_are(tiny_gguf, tiny_llama):
    header = read_header(tiny_gguf)
    tensor = header.tensors["output_norm.weight"]
    stored = np.fromfile(tiny_gguf, dtype="<f4", count=tensor.elements, offset=header.data_start + tensor.offset)
    np.testing.assert_array_equal(stored, tiny_llama.model.norm.weight.detach().numpy())
    assert header.architecture == "llama"
    assert header.elements == sum(weights.numel() for weights in tiny_llama.parameters())


def test_file_that_is_no_gguf(own_cache, tmp_path):
    path = tmp_path / "page.gguf"
    path.write_text("<html>not found</html>")
    with pytest.raises(ModelError, match="no GGUF file"):
        load(path)
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="cannot read"):
        load(path)


def test_old_version(own_cache, tmp_path):
    path = tmp_path / "old.gguf"
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(64))
    with pytest.raises(ModelError, match="version 1"):
        load(path)


def test_truncation_anywhere_is_noticed(own_cache, tmp_path, tiny_gguf):
    whole = tiny_gguf.read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(8, 2000, 61), *range(2000, len(whole), 5003), len(whole) - 64]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cut short|cannot read"):
            read_header(path)


def test_checksum_follows_the_file(own_cache, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"one")
    first = checksum(path)
    assert first == checksum(path) == "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
    path.write_bytes(b"three")
    assert checksum(path) != first
