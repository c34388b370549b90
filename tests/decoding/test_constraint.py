"""Pruning drafts to what a constraint allows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cluster.decoding.constraint import prune
from cluster.decoding.tree import CONTEXT, TreeBuilder


class Even:
    """Allows paths while their running sum is even."""

    def mask(self, row):
        row[1::2] = -np.inf

    def observe(self, token):
        assert token % 2 == 0

    def valid_length(self, path):
        total = 0
        for at, token in enumerate(path):
            total += token
            if total % 2:
                return at
        return len(path)

    def forced(self):
        return ()


def paths_of(tree):
    """The token path of every node."""
    paths = []
    for node in range(1, len(tree)):
        path: list[int] = []
        while node > 0:
            path.insert(0, int(tree.tokens[node]))
            node = int(tree.parents[node])
        paths.append(tuple(path))
    return set(paths)


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=6))
def test_pruning_keeps_the_valid_paths_and_only_those(paths):
    builder = TreeBuilder(64)
    builder.reset(9)
    for path in paths:
        builder.add_path(np.array(path, np.int32), CONTEXT)
    tree = builder.build()
    pruned = prune(tree, Even())
    assert paths_of(pruned) == {p for p in paths_of(tree) if Even().valid_length(p) == len(p)}
    assert pruned.tokens[0] == 9 and pruned.parents[0] == -1
    assert (pruned.parents[1:] < np.arange(1, len(pruned))).all()
    assert all(pruned.depths[n] == pruned.depths[pruned.parents[n]] + 1 for n in range(1, len(pruned)))


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=5),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=5),
    st.integers(1, 12),
)
def test_merging_trees_is_a_union_within_the_capacity(mine, theirs, capacity):
    builders = []
    for paths in (mine, theirs):
        builder = TreeBuilder(64)
        builder.reset(7)
        for path in paths:
            builder.add_path(np.array(path, np.int32), CONTEXT)
        builders.append(builder)
    other = builders[1].build()
    both = paths_of(builders[0].build()) | paths_of(other)
    builders[0].add_tree(other)
    assert paths_of(builders[0].build()) == both
    small = TreeBuilder(capacity)
    small.reset(7)
    small.add_tree(other)
    assert len(small.build()) == min(capacity, len(other))
    assert paths_of(small.build()) <= paths_of(other)
