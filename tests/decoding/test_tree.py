from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cluster.decoding.tree import CONTEXT, TreeBuilder, find_child, single_node

paths = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=12)


def built(root: int, added: list[list[int]], capacity: int):
    builder = TreeBuilder(capacity)
    builder.reset(root)
    for path in added:
        builder.add_path(np.array(path, np.int32), CONTEXT)
    return builder.build()


def path_to(tree, node: int) -> tuple[int, ...]:
    path: list[int] = []
    while node > 0:
        path.insert(0, int(tree.tokens[node]))
        node = tree.parents[node]
    return tuple(path)


@given(paths)
def test_tree_is_the_trie_union_of_its_paths(added):
    tree = built(9, added, 256)
    nodes = {path_to(tree, i) for i in range(len(tree))}
    assert nodes == {tuple(p[:n]) for p in added for n in range(1, len(p) + 1)} | {()}
    assert len(nodes) == len(tree)


@given(paths, st.integers(1, 20))
def test_capacity_keeps_what_came_first(added, capacity):
    whole, cut = built(9, added, 256), built(9, added, capacity)
    assert len(cut) == min(capacity, len(whole))
    assert cut.tokens.tolist() == whole.tokens[: len(cut)].tolist()
    assert cut.parents.tolist() == whole.parents[: len(cut)].tolist()


@given(paths)
def test_topology_depths_and_ancestors_agree(added):
    tree = built(9, added, 64)
    mask = tree.ancestors()
    for node in range(len(tree)):
        line = {node}
        at = node
        while tree.parents[at] >= 0:
            assert tree.parents[at] < at
            at = tree.parents[at]
            line.add(at)
        assert set(np.flatnonzero(mask[node])) == line
        assert tree.depths[node] == len(line) - 1
    assert tree.is_chain == all(tree.parents[i] == i - 1 for i in range(len(tree)))


def test_find_child_needs_parent_and_token():
    tree = built(9, [[1, 2], [2, 2]], 16)
    assert find_child(tree.tokens, tree.parents, 0, 2) == 3
    assert find_child(tree.tokens, tree.parents, 1, 2) == 2
    assert find_child(tree.tokens, tree.parents, 1, 1) == -1


def test_single_node():
    tree = single_node(5)
    assert (tree.tokens.tolist(), tree.parents.tolist(), tree.is_chain) == ([5], [-1], True)
