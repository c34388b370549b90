"""Draws for whole batches are those made one by one."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.decoding.batched_draw import draw_rows
from cluster.decoding.params import SamplingParams
from cluster.decoding.sampling import SamplingState, choose
from cluster.decoding.tree import TreeBuilder
from cluster.decoding.verification import verify, walk_ahead

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 5, 700, 5000]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3, 1e-50]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    seed=st.integers(0, 10**6),
)


def logits_of(rows: int, vocabulary: int, scale: float) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(rows)) * scale


@given(st.lists(PARAMS, min_size=1, max_size=5), st.sampled_from([3, 300, 2000]), st.sampled_from([0.01, 3.0]))
def test_rows_draw_what_they_draw_alone(params, vocabulary, scale):
    logits = logits_of(len(params), vocabulary, scale)
    positions = list(range(len(params)))
    states = [SamplingState(p, frozenset(), frozenset(), position=n) for p, n in zip(params, positions, strict=True)]
    assert draw_rows(logits, params, positions) == choose(logits, states)


def test_many_rows_in_parts():
    params = [SamplingParams(temperature=1.0, top_p=0.8, seed=s) for s in range(150)]
    logits = logits_of(150, 40, 2.0)
    states = [SamplingState(p, frozenset(), frozenset()) for p in params]
    assert draw_rows(logits, params, [0] * 150) == choose(logits, states)


@given(st.integers(0, 10**6))
def test_walks_with_all_nodes_drawn_are_those_level_by_level(seed):
    params = [
        SamplingParams(temperature=0.9, seed=seed, max_new_tokens=20),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.2, top_k=2, seed=seed, max_new_tokens=3),
        SamplingParams(temperature=1.0, repetition_penalty=1.2, seed=seed),
    ]
    random = np.random.default_rng(seed)
    trees = []
    for _ in params:
        builder = TreeBuilder(12)
        builder.reset(0)
        for _ in range(6):
            builder.add_path(random.integers(0, 3, 4).astype(np.int32), 0)
        trees.append(builder.build())
    offsets = np.cumsum([0, *(len(t) for t in trees)])
    logits = logits_of(int(offsets[-1]), 3, 1.0)
    expected, states = ([SamplingState(p, frozenset({2}), frozenset({1})) for p in params] for _ in range(2))
    walks = verify(trees, logits, logits.argmax(-1).to(torch.int32).numpy(), expected)
    ahead = walk_ahead(trees, logits, offsets, states)
    assert sorted(ahead) == [0, 2]
    for b, walk in ahead.items():
        assert (walk.nodes, walk.tokens) == (walks[b].nodes, walks[b].tokens)
        assert states[b].position == expected[b].position
