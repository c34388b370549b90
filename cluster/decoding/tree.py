"""The draft tree: guessed tokens in topological order, and what attention and verification derive from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

# What proposed a node. The values index per-source statistics.
SOURCES = ("root", "context", "next_next", "corpus", "prediction", "grammar", "successor")
ROOT, CONTEXT, NEXT_NEXT, CORPUS, PREDICTION, GRAMMAR, SUCCESSOR = range(len(SOURCES))


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Draft tokens of one sequence for one step.

    Node 0 is the root: the last emitted token, not yet in the KV cache. A parent always precedes its children.

    Attributes:
        tokens: int32 [W], token ids.
        parents: int32 [W], index of the parent node, -1 for the root.
        depths: int32 [W], distance from the root.
        sources: int8 [W], index into ``SOURCES`` of what proposed the node.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    depths: NDArray[np.int32]
    sources: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """True if every node is the only child of the one before it, so that a causal mask fits."""
        return bool(self.depths[-1] == len(self.depths) - 1)

    def first(self, count: int) -> DraftTree:
        """The tree of the first ``count`` nodes."""
        return DraftTree(self.tokens[:count], self.parents[:count], self.depths[:count], self.sources[:count])

    def ancestors(self) -> NDArray[np.bool_]:
        """Bool [W, W]: entry (i, j) is true if j is i or one of its ancestors."""
        return ancestor_mask(self.parents)


class TreeBuilder:
    """Grows a draft tree of at most ``capacity`` nodes as the trie union of the paths it is given."""

    def __init__(self, capacity: int) -> None:
        self._tokens = np.empty(capacity, np.int32)
        self._parents = np.empty(capacity, np.int32)
        self._depths = np.empty(capacity, np.int32)
        self._sources = np.empty(capacity, np.int8)
        self._size = 0

    def reset(self, root_token: int) -> None:
        """Start over with a root only."""
        self._tokens[0] = root_token
        self._parents[0] = -1
        self._depths[0] = 0
        self._sources[0] = ROOT
        self._size = 1

    @property
    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int8]]:
        """The growing buffers, for compiled code that adds many paths at once."""
        return self._tokens, self._parents, self._depths, self._sources

    @property
    def size(self) -> int:
        """Nodes so far, the root included."""
        return self._size

    @size.setter
    def size(self, value: int) -> None:
        self._size = value

    def add_path(self, path: NDArray[np.int32], source: int) -> None:
        """Merge ``path`` (int32 [L], children of the root downwards) into the tree, as far as it fits."""
        self._size = add_path(*self.arrays, self._size, path, source)

    def add_tree(self, tree: DraftTree) -> None:
        """Merge a tree with the same root, as far as it fits."""
        parents = tree.parents[1:] - 1  # to a trie the root is no node: its children have parent -1
        self._size = add_trie(*self.arrays, self._size, tree.tokens[1:], parents, tree.sources[1:], len(tree))

    def build(self) -> DraftTree:
        """A copy of the tree so far."""
        n = self._size
        return DraftTree(
            self._tokens[:n].copy(), self._parents[:n].copy(), self._depths[:n].copy(), self._sources[:n].copy()
        )


def single_node(token: int) -> DraftTree:
    """A tree that is only its root: what a vanilla step verifies."""
    zero = np.zeros(1, np.int32)
    return DraftTree(np.array([token], np.int32), zero - 1, zero, np.zeros(1, np.int8))


@njit(cache=True, nogil=True)
def find_child(tokens: NDArray[np.int32], parents: NDArray[np.int32], node: int, token: int) -> int:
    """Index of the child of ``node`` that holds ``token``, or -1."""
    for child in range(node + 1, len(tokens)):
        if parents[child] == node and tokens[child] == token:
            return child
    return -1


@njit(cache=True, nogil=True)
def add_path(
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
    depths: NDArray[np.int32],
    sources: NDArray[np.int8],
    size: int,
    path: NDArray[np.int32],
    source: int,
) -> int:
    """Trie union of a path with the tree in the buffers; returns the new size. Buffers' length is the capacity."""
    node = 0
    for token in path:
        child = find_child(tokens[:size], parents[:size], node, token)
        if child < 0:
            if size == len(tokens):
                return size
            child = size
            tokens[child] = token
            parents[child] = node
            depths[child] = depths[node] + 1
            sources[child] = source
            size += 1
        node = child
    return size


@njit(cache=True, nogil=True)
def add_trie(
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
    depths: NDArray[np.int32],
    sources: NDArray[np.int8],
    size: int,
    trie_tokens: NDArray[np.int32],
    trie_parents: NDArray[np.int32],
    trie_sources: NDArray[np.int8],
    max_depth: int,
) -> int:
    """Union of a trie (topologically ordered, parent -1 is the root) with the tree in the buffers; the new size."""
    places = np.empty(len(trie_tokens), np.int64)
    for i in range(len(trie_tokens)):
        node = places[trie_parents[i]] if trie_parents[i] >= 0 else 0
        places[i] = -1
        if node < 0 or depths[node] >= max_depth:
            continue
        child = find_child(tokens[:size], parents[:size], node, trie_tokens[i])
        if child < 0 and size < len(tokens):
            child = size
            tokens[child] = trie_tokens[i]
            parents[child] = node
            depths[child] = depths[node] + 1
            sources[child] = trie_sources[i]
            size += 1
        places[i] = child
    return size


@njit(cache=True, nogil=True)
def ancestor_mask(parents: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Bool [W, W] ancestor-or-self relation of a topologically ordered parent array [W]."""
    n = len(parents)
    mask = np.zeros((n, n), np.bool_)
    for node in range(n):
        parent = parents[node]
        if parent >= 0:
            mask[node, :node] = mask[parent, :node]
        mask[node, node] = True
    return mask
