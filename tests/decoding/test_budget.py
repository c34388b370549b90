"""The budget: the number of draft tokens with most expected tokens per second, found among all."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.decoding.budget import tree_sizes, worthwhile

TRUST = 0.9  # of path probabilities
PATHS = st.lists(st.floats(0.001, 1.0), max_size=12).map(
    lambda p: np.array([1.0, *sorted(p, reverse=True)], np.float32)
)
COSTS = st.lists(st.floats(0.0, 0.5), min_size=40, max_size=40).map(
    lambda s: 1.0 + np.concatenate(([0.0], np.cumsum(s)))
)


def rate(trees, sizes, costs) -> float:
    drafted = sum(sizes) - len(sizes)
    gained = sum(t[1:n].sum(dtype=np.float64) for t, n in zip(trees, sizes, strict=True))
    return float((len(trees) + TRUST * gained) / costs[drafted])


@given(st.lists(PATHS, min_size=1, max_size=3), COSTS)
def test_no_number_of_nodes_is_better_and_little_is_not_worth_it(trees, costs):
    sizes = tree_sizes(trees, costs)
    assert all(1 <= n <= len(t) for n, t in zip(sizes, trees, strict=True))
    chances = np.sort(np.concatenate([t[1:] for t in trees]))[::-1].astype(np.float64)
    every = [(len(trees) + TRUST * chances[:m].sum()) / costs[m] for m in range(len(chances) + 1)]
    if sum(sizes) > len(trees):
        assert rate(trees, sizes, costs) == pytest.approx(max(every), rel=1e-5)
        assert max(every) > 1.029 * every[0]
    else:
        assert max(every) < 1.031 * every[0]


@given(st.lists(PATHS, min_size=1, max_size=3), COSTS)
def test_nodes_below_the_floor_are_never_drafted(trees, costs):
    floor = worthwhile(costs, len(trees))
    for size, tree in zip(tree_sizes(trees, costs), trees, strict=True):
        assert all(tree[1:size] >= floor * (1 - 1e-5))


def test_free_nodes_are_all_drafted_and_dear_ones_are_not():
    tree = np.array([1.0, 0.5, 0.01], np.float32)
    assert tree_sizes([tree], np.ones(3)) == [3]
    assert tree_sizes([tree], np.array([1.0, 1.2, 2.0])) == [2]
    assert tree_sizes([tree, tree], np.arange(1.0, 6.0) * 3) == [1, 1]
