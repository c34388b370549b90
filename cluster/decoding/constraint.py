"""Constraints on an answer's tokens, such as a grammar, and keeping drafts within them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from cluster.decoding.tree import DraftTree


class Constraint(Protocol):
    """What the next token may be, given those emitted so far. Stateful: one object for one request."""

    def mask(self, row: Tensor) -> None:
        """Set the logits (float [V]) of tokens that are not allowed next to minus infinity; some token stays."""
        ...

    def observe(self, token: int) -> None:
        """An allowed token has been emitted."""
        ...

    def valid_length(self, path: Sequence[int]) -> int:
        """How many tokens of ``path`` would be allowed one after the other from here."""
        ...

    def forced(self) -> Sequence[int]:
        """Tokens of which each is the likely only choice from here on; may be empty."""
        ...


def prune(tree: DraftTree, constraint: Constraint) -> DraftTree:
    """The tree without nodes that the constraint would never let the target choose."""
    parents = tree.parents.tolist()
    tokens = tree.tokens.tolist()
    valid = [True] + [False] * (len(tree) - 1)
    inner = set(parents)
    for leaf in range(1, len(tree)):
        if leaf in inner:
            continue
        path = []
        node = leaf
        while node > 0:
            path.append(node)
            node = parents[node]
        path.reverse()
        for node in path[: constraint.valid_length([tokens[node] for node in path])]:
            valid[node] = True
    if all(valid):
        return tree
    kept = np.flatnonzero(valid)
    renumbered = np.cumsum(valid, dtype=np.int32) - 1
    new_parents = np.where(tree.parents[kept] < 0, -1, renumbered[tree.parents[kept]]).astype(np.int32)
    return DraftTree(tree.tokens[kept], new_parents, tree.depths[kept], tree.sources[kept])
