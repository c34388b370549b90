"""Loading model directories: what comes out, and what is said about broken ones."""

import json

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from cluster.models import ModelConfig, ModelError, load_model, load_tokenizer, render_chat
from cluster.models.devices import choose_device, choose_dtype, has_native_bfloat16


def load(directory, **settings):
    return load_model(ModelConfig(model=str(directory), **{"device": "cpu", **settings}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_arrive_in_the_wanted_type(tiny_directory, tiny_llama, dtype):
    loaded = load(tiny_directory, dtype=dtype)
    assert loaded.dtype == getattr(torch, dtype)
    for name, weights in loaded.model.state_dict().items():
        torch.testing.assert_close(weights, tiny_llama.state_dict()[name].to(loaded.dtype), rtol=0, atol=0)


def test_positions_name_and_attention(tiny_directory):
    loaded = load(tiny_directory)
    assert (loaded.name, loaded.max_model_len) == ("tiny-llama", 128)
    assert loaded.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("configured", [0, [0, 5]])
def test_stop_ids_are_gathered_from_everywhere(tiny_directory, configured):
    (tiny_directory / "generation_config.json").write_text(json.dumps({"eos_token_id": configured}))
    expected = {0, 2} | ({5} if configured != 0 else set())  # 0: tokenizer's; 2: the chat template's
    assert load(tiny_directory).stop_ids == expected


def test_without_chat_template(tiny_directory):
    (tiny_directory / "chat_template.jinja").unlink()
    loaded = load(tiny_directory)
    assert loaded.stop_ids == {0}
    with pytest.raises(ModelError, match=r"no chat template.*/v1/completions"):
        render_chat(loaded.tokenizer, [{"role": "user", "content": "Hi"}])


def test_chat_with_options(tiny_tokenizer):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "He"}]
    continued = render_chat(tiny_tokenizer, messages, continue_final_message=True)
    assert tiny_tokenizer.decode(continued).endswith("<|im_start|>assistant\nHe")
    closed = render_chat(tiny_tokenizer, messages, add_generation_prompt=False)
    assert tiny_tokenizer.decode(closed).endswith("He<|im_end|>\n")


@pytest.mark.parametrize("messages", [[{"role": "user", "content": 5 + 2j}, 3], [{"role": "user"}]])
def test_messages_the_template_cannot_take(tiny_directory, messages):
    tokenizer = load_tokenizer(str(tiny_directory))
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"
    with pytest.raises(ModelError, match="does not accept these messages"):
        render_chat(tokenizer, messages)


def test_template_that_refuses(tiny_directory):
    tokenizer = load_tokenizer(str(tiny_directory))
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ModelError, match="roles must alternate"):
        render_chat(tokenizer, [{"role": "user", "content": "Hi"}])


def test_truncated_weights(tiny_directory):
    path = tiny_directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="corrupt or incomplete"):
        load(tiny_directory)


def test_garbage_weights(tiny_directory):
    (tiny_directory / "model.safetensors").write_bytes(b"not tensors at all, but long enough to look at")
    with pytest.raises(ModelError, match="corrupt or incomplete"):
        load(tiny_directory)


def test_missing_tensor(tiny_directory):
    path = tiny_directory / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 tensors.*layers\.1\.mlp\.up_proj"):
        load(tiny_directory)


def test_no_weights(tiny_directory):
    (tiny_directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"cannot load tiny-llama: .*model\.safetensors"):
        load(tiny_directory)


def test_broken_config(tiny_directory):
    (tiny_directory / "config.json").write_text("{ no json")
    with pytest.raises(ModelError, match=r"cannot load tiny-llama: .*JSON"):
        load(tiny_directory)


def test_unknown_model_type(tiny_directory):
    (tiny_directory / "config.json").write_text(json.dumps({"model_type": "never_heard_of"}))
    with pytest.raises(ModelError, match="never_heard_of"):
        load(tiny_directory)


def test_config_without_positions(tiny_directory):
    path = tiny_directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": None}))
    with pytest.raises(ModelError, match="tiny-llama"):
        load(tiny_directory)


def test_own_code_needs_trust(tiny_directory):
    path = tiny_directory / "config.json"
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "conf.Conf", "AutoModelForCausalLM": "mod.Mod"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    with pytest.raises(ModelError, match="set trust_remote_code"):
        load(tiny_directory)


def test_own_code_is_checked_before_its_weights_are_read(tiny_directory):
    path = tiny_directory / "config.json"
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "mod.Conf", "AutoModelForCausalLM": "mod.Mod"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own | {"architectures": ["Mod"]}))
    (tiny_directory / "mod.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Conf(LlamaConfig):\n    model_type = 'mine'\n"
        "class Mod(LlamaForCausalLM):\n    config_class = Conf\n    _supports_attention_backend = False\n"
    )
    (tiny_directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="Mod does not take an attention function"):
        load(tiny_directory, trust_remote_code=True)


def test_hub_out_of_reach():
    with pytest.raises(ModelError, match=r"hub is not reachable.*embedded model"):
        load("no-such-owner/no-such-model")


@pytest.mark.parametrize(("name", "reason"), [("gpu", "unknown device"), ("mps", "not supported")])
def test_unusable_devices(name, reason):
    with pytest.raises(ModelError, match=reason):
        choose_device(name)


def test_gpu_that_is_not_there():
    with pytest.raises(ModelError, match="GPU"):
        choose_device("cuda:99")


def test_automatic_dtype_follows_the_device():
    cpu = torch.device("cpu")
    expected = torch.bfloat16 if has_native_bfloat16(cpu) else torch.float32
    assert choose_dtype("auto", cpu) == expected
    assert choose_dtype("float16", cpu) == torch.float16


def test_settings_are_checked():
    for wrong in ({"dtype": "int8"}, {"model": ""}, {"modell": "x"}):
        with pytest.raises(ValidationError):
            ModelConfig.model_validate(wrong)
