"""Kernels for the tests of this folder, and tiny models to optimise."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.engine.cpu.kernels import Kernels, load_kernels


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    loaded = load_kernels()
    if loaded is None:
        pytest.skip("the CPU kernels cannot be compiled on this machine")
    return loaded


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests run on one thread unless they set a number: fast on a busy machine, where threads wait in vain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_llama(dtype: torch.dtype = torch.float32, **changes) -> LlamaForCausalLM:
    """A Llama of three small layers with random weights and sizes that are no multiples of a panel."""
    settings = {
        "vocab_size": 211, "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 512,
    }  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(settings | changes)))
    nn.Module.to(model, dtype)
    return model.eval()
