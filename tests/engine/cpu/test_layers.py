"""Fused decoder layers: the model's own answers, the same bits however a step is put together."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from cluster.engine.cpu import TreeStep, optimize
from tests.engine.cpu.test_attention import relation

SIZES: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip
FUSABLE: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama, odd sizes": LlamaConfig(**SIZES | {"head_dim": 12, "intermediate_size": 51}),
    "mistral": MistralConfig(**SIZES, sliding_window=8),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "gemma2": Gemma2Config(**SIZES, sliding_window=8, attn_logit_softcapping=5.0),
    "gemma3": Gemma3TextConfig(**SIZES, sliding_window=8),
}
OTHERS: dict[str, PreTrainedConfig] = {
    "granite": GraniteConfig(**SIZES, residual_multiplier=0.5),
    "phi": PhiConfig(**SIZES),
    "olmo2": Olmo2Config(**SIZES),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TREE = [-1, 0, 1, 1, 0, 4, 5, 3, 2]


def make(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # all ones, or zeros, otherwise: a norm left out would go unnoticed
            parameter.data += torch.rand_like(parameter) / 2
        elif "bias" in name:
            parameter.data.normal_(std=0.1)
    model.eval()
    return model


class Pools:
    """A pool of the smallest kind, and nothing else a cache may do: only fused layers can work with it."""

    def __init__(self, model, rows: int = 120) -> None:
        shape = (SIZES["num_key_value_heads"], rows, model.config.head_dim)
        self._pools = [
            tuple(torch.full(shape, torch.nan, dtype=model.dtype) for _ in "kv")
            for _ in range(SIZES["num_hidden_layers"])
        ]
        self.tree_step: TreeStep | None = None

    def pools(self, layer):
        return self._pools[layer]

    def get_seq_length(self, layer_idx=0):
        return 0


def run(model, pools, tokens, starts, lengths, widths, ancestors=None):
    """Logits [T, V] of one step."""
    AttentionInterface.register("only_fused", lambda *_, **__: pytest.fail("an attention of its own was called"))
    pools.tree_step = step = TreeStep(starts, lengths, widths, ancestors)
    before, model.config._attn_implementation = model.config._attn_implementation, "only_fused"
    try:
        with torch.inference_mode():
            positions = torch.from_numpy(step.positions())[None]
            return model(torch.as_tensor(tokens)[None], position_ids=positions, cache=pools).logits[0]
    finally:
        model.config._attn_implementation = before


def tokens_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SIZES["vocab_size"], count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUSABLE)
def test_every_node_of_a_tree_gets_the_models_own_logits(kernels, name, dtype):
    model = make(FUSABLE[name], dtype)
    own = copy.deepcopy(model)
    done = optimize(model)
    assert done.fused == SIZES["num_hidden_layers"], done.not_fused
    prompt, nodes = tokens_of(17), tokens_of(len(TREE), seed=1)
    pools = Pools(model)
    run(model, pools, prompt, [3], [0], [17])
    logits = run(model, pools, nodes, [3], [17], [len(TREE)], [relation(TREE)])
    for i, path in enumerate(relation(TREE)):
        with torch.inference_mode():
            ids = torch.from_numpy(np.concatenate([prompt, nodes[path]]))[None]
            expected = own(ids).logits[0, -1].float()
        error = (logits[i].float() - expected).norm() / expected.norm()
        assert error < 20 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUSABLE)
def test_a_tree_in_a_batch_gives_the_bits_of_one_token_at_a_time(kernels, name, dtype):
    model = make(FUSABLE[name], dtype)
    optimize(model)
    prompt, nodes, other = tokens_of(17), tokens_of(len(TREE), seed=1), tokens_of(40, seed=2)
    pools = Pools(model)
    run(model, pools, np.concatenate([other[:30], prompt[:9]]), [60, 3], [0, 0], [30, 9])
    run(model, pools, prompt[9:], [3], [9], [8])
    logits = run(
        model, pools, np.concatenate([other[30:], nodes]), [60, 3], [30, 17], [10, len(TREE)], [None, relation(TREE)]
    )[10:]
    for node in (0, 3, 6, 8):
        path = np.flatnonzero(relation(TREE)[node])
        alone = Pools(model)
        for position, token in enumerate(np.concatenate([prompt, nodes[path]])):
            last = run(model, alone, [token], [0], [position], [1])
        assert torch.equal(last[0], logits[node])


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_threads_change_nothing(kernels, name, threads):
    model = make(FUSABLE[name])
    optimize(model)
    tokens = tokens_of(60)
    expected = run(model, Pools(model), tokens, [0], [0], [60])
    torch.set_num_threads(threads)
    assert torch.equal(run(model, Pools(model), tokens, [0], [0], [60]), expected)


@pytest.mark.parametrize("name", OTHERS)
def test_a_layer_that_is_something_else_is_packed_but_not_fused(kernels, name):
    model = make(OTHERS[name])
    ids = torch.from_numpy(tokens_of(20))[None]
    with torch.inference_mode():
        expected = model(ids).logits
        done = optimize(model)
        assert torch.allclose(model(ids).logits, expected, atol=1e-5)
    assert done.fused == 0
    assert done.packed == sum(isinstance(m, torch.nn.Linear) for m in model.modules())


def test_other_caches_run_the_models_own_code_and_undo_removes_ours(kernels):
    model: Any = make(FUSABLE["llama"])
    ids = torch.from_numpy(tokens_of(20))[None]
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    members = {name: set(module.__dict__) for name, module in model.named_modules()}
    with optimize(model):
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), expected)
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == members


def test_pools_that_do_not_fit_are_refused(kernels):
    model = make(FUSABLE["llama"])
    optimize(model)
    with pytest.raises(ValueError, match="pool rows"):
        run(model, Pools(model, rows=4), tokens_of(5), [0], [0], [5])
    with pytest.raises(ValueError, match="bfloat16"):
        run(model, Pools(make(FUSABLE["llama"], torch.bfloat16)), tokens_of(5), [0], [0], [5])
    with pytest.raises(ValueError, match="6 tokens"):
        run(model, Pools(model), tokens_of(5), [0], [0], [6])


def test_who_watches_a_layer_sees_its_outputs(kernels):
    model = make(FUSABLE["gemma3"])
    own = copy.deepcopy(model)
    optimize(model)
    tokens = tokens_of(30)
    expected = run(model, Pools(model), tokens, [0], [0], [30])
    seen = []
    hook = model.model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output))
    assert torch.equal(run(model, Pools(model), tokens, [0], [0], [30]), expected)
    hook.remove()
    with torch.inference_mode():
        states = own(torch.from_numpy(tokens)[None], output_hidden_states=True).hidden_states
    assert torch.allclose(seen[0], states[2], atol=1e-4)
    assert torch.equal(run(model, Pools(model), tokens, [0], [0], [30]), expected)


def test_layers_whose_results_are_used_elsewhere_are_not_fused(kernels):
    model = make(FUSABLE["llama"])
    base, held = model.model, {}
    layer, norm = base.layers[1], base.norm.forward

    class Kept(type(layer)):  # type: ignore[misc]
        def forward(self, hidden_states, *args, **kwargs):
            held["middle"] = hidden_states
            return super().forward(hidden_states, *args, **kwargs)

    layer.__class__ = Kept
    base.norm.forward = lambda x: norm(x + held.pop("middle", x))
    ids = torch.from_numpy(tokens_of(20))[None]
    with torch.inference_mode():
        expected = model(ids).logits
        done = optimize(model)
        assert torch.allclose(model(ids).logits, expected, atol=1e-5)
    assert done.fused == 0
    assert any("logits differ" in reason for reason in done.not_fused)


@pytest.mark.parametrize("where", ["", "self_attn", "mlp", "input_layernorm"])
def test_a_layer_with_code_or_hooks_of_somebody_elses_inside_is_left_alone(kernels, where):
    model = make(FUSABLE["llama"])
    part = model.model.layers[1].get_submodule(where)
    if where in ("", "mlp"):
        part.forward = lambda *args, own=part.forward, **kwargs: own(*args, **kwargs)
    else:
        part.register_forward_hook(lambda *_: None)
    assert optimize(model).fused == 2
