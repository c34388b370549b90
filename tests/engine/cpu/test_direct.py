"""A step without the model's own Python: the same bits, and only where nothing is left out."""

from typing import Any

import numpy as np
import pytest
import torch

from cluster.engine.cpu import TreeStep, find_direct, optimize
from tests.engine.cpu.test_attention import relation
from tests.engine.cpu.test_layers import DTYPES, FUSABLE, OTHERS, TREE, Pools, make, run, tokens_of

DIRECT = ["llama", "llama, odd sizes", "mistral", "qwen2", "qwen3"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DIRECT)
def test_a_tree_gets_the_bits_that_the_model_gives(kernels, name, dtype):
    model = make(FUSABLE[name], dtype)
    optimize(model)
    direct: Any = find_direct(model)
    pools, own, tree = Pools(model), Pools(model), relation(TREE)
    tokens, keep = tokens_of(20 + len(TREE)), torch.tensor([0, 2, 3, 8])
    for ids, length, ancestors in ((tokens[:20], 0, None), (tokens[20:], 20, [tree])):
        expected = run(model, own, ids, [0], [length], [len(ids)], ancestors)
        pools.tree_step = TreeStep([0], [length], [len(ids)], ancestors)
        positions = torch.from_numpy(pools.tree_step.positions())[None]
        with torch.inference_mode():
            logits = direct(torch.from_numpy(np.asarray(ids))[None], positions, keep, pools)
        assert torch.equal(logits, expected[keep])


@pytest.mark.parametrize("name", ["gemma2", "gemma3", *OTHERS])
def test_a_model_that_does_something_else_goes_its_own_way(kernels, name):
    model = make((FUSABLE | OTHERS)[name])
    optimize(model)
    assert find_direct(model) is None


def test_logits_that_the_model_changes_afterwards_are_noticed(kernels):
    model = make(FUSABLE["llama"])
    forward = model.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output

    model.forward = scaled
    optimize(model)
    assert find_direct(model) is None


def test_it_steps_aside_for_hooks_and_after_undo(kernels):
    model: Any = make(FUSABLE["llama"])
    optimization = optimize(model)
    direct: Any = find_direct(model)
    assert direct.applies
    for watched in (model, model.model):
        hook = watched.register_forward_hook(lambda *_: None)
        assert not direct.applies
        hook.remove()
    assert direct.applies
    optimization.undo()
    assert not direct.applies
    assert find_direct(model) is None
