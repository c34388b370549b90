"""Optimising a model in place: same answers, honest about its weights, undone without a trace."""

import logging

import pytest
import torch
from torch import nn

from cluster.engine.cpu import InferenceOnlyError, optimize
from cluster.engine.cpu.linear import PackedLinear, PackedWeights
from tests.engine.cpu.conftest import tiny_llama

IDS = torch.arange(1, 20)[None]


def logits(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
def test_answers_stay_and_undo_restores_everything(kernels, dtype, tied):
    model = tiny_llama(dtype, tie_word_embeddings=tied, attention_bias=True)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    members = {name: set(module.__dict__) for name, module in model.named_modules()}
    expected = logits(model)

    done = optimize(model)
    assert done.packed == 3 * 7 + 1
    assert done.batch_invariant
    assert (logits(model) - expected).norm() <= 8 * torch.finfo(dtype).eps * expected.norm()
    generated = model.generate(IDS, max_new_tokens=5, do_sample=False)
    assert generated.shape == (1, IDS.shape[1] + 5)

    done.undo()
    done.undo()
    assert torch.equal(logits(model), expected)
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == members
    after = model.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[name], state[name]) for name in state)
    assert all(dict(model.named_parameters())[name] is parameter for name, parameter in parameters.items())


def test_packed_weights_are_held_once(kernels):
    model = tiny_llama(tie_word_embeddings=True)
    with optimize(model):
        layer = model.model.layers[0].mlp.up_proj
        assert layer.weight.shape == (100, 72)
        assert layer.weight.untyped_storage().nbytes() == 4
        assert layer.weight.isnan().all()
        # tied to the output layer, and still looked up by rows
        assert not model.model.embed_tokens.weight.isnan().any()
        with pytest.raises(InferenceOnlyError, match="undo"):
            model.state_dict()
    assert not model.model.layers[0].mlp.up_proj.weight.isnan().any()


def test_a_layer_with_a_forward_of_its_own_is_left_alone(kernels):
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = tiny_llama()
    special = model.model.layers[1].mlp
    special.down_proj = Doubled(100, 72, bias=False)
    calls = []
    special.up_proj.register_forward_hook(lambda *_: calls.append(1))
    expected = logits(model)
    done = optimize(model)
    assert done.packed == 3 * 7 + 1 - 2
    calls.clear()
    assert torch.allclose(logits(model), expected, atol=1e-4)
    assert calls


def test_a_model_that_answers_differently_is_restored_with_a_warning(kernels, monkeypatch, caplog):
    model = tiny_llama()
    expected = logits(model)

    def wrong(weight, bias):
        class Wrong(PackedLinear):
            def __call__(self, x):
                return super().__call__(x) * 1.5

        return Wrong(PackedWeights(kernels, [weight], [bias]))

    monkeypatch.setattr("cluster.engine.cpu.optimization.pack_linear", wrong)
    with caplog.at_level(logging.WARNING):
        done = optimize(model)
    assert "unoptimised" in caplog.text
    assert done.packed == 0
    assert torch.equal(logits(model), expected)


def test_a_failure_on_the_way_restores_the_model(kernels, monkeypatch):
    model = tiny_llama()
    expected = logits(model)

    def failing(*_):
        raise MemoryError("no room")

    monkeypatch.setattr("cluster.engine.cpu.optimization.describe", failing)
    with pytest.raises(MemoryError):
        optimize(model)
    assert torch.equal(logits(model), expected)
