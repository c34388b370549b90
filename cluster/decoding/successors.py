"""What the target ranked after a token earlier: a table of successors (Token Recycling, arXiv 2408.08696)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cluster.decoding.evidence import SUCCESSORS, gap_class
from cluster.decoding.ranking import Ranked

_PAIR_SLOTS = 1 << 15
EMPTY = np.int32(-1)


class SuccessorArrays(NamedTuple):
    """Ranked successors of tokens [V, SUCCESSORS] and of pairs of tokens, which lie in slots of a hash table."""

    ids: NDArray[np.int32]
    gaps: NDArray[np.int8]  # classes of the logits' distance from the best one
    pairs: NDArray[np.int32]  # [slots, 2]
    pair_ids: NDArray[np.int32]
    pair_gaps: NDArray[np.int8]


class SuccessorTable:
    """The ranked successors last seen after each token, and after pairs of tokens; of fixed size.

    Pairs share slots by their hash: a newer pair takes the slot of an older one. Both tables are of one model and
    shared by all its requests.
    """

    def __init__(self, vocabulary: int) -> None:
        self.arrays = SuccessorArrays(
            np.full((vocabulary, SUCCESSORS), EMPTY, np.int32),
            np.zeros((vocabulary, SUCCESSORS), np.int8),
            np.full((_PAIR_SLOTS, 2), EMPTY, np.int32),
            np.full((_PAIR_SLOTS, SUCCESSORS), EMPTY, np.int32),
            np.zeros((_PAIR_SLOTS, SUCCESSORS), np.int8),
        )

    def observe(
        self,
        before: int,
        tokens: NDArray[np.int32],
        parents: NDArray[np.int32],
        ranked: Ranked,
        nodes: NDArray[np.int64],
    ) -> None:
        """Remember what was ranked at the nodes of a verified tree.

        Args:
            before: the token before the root, or -1.
            tokens, parents: int32 [W], the tree.
            ranked: the best SUCCESSORS or more tokens at each node; ids -1 where that is not known.
            nodes: int64 [N], visited nodes: what was ranked there counts over what was ranked at guesses.
        """
        _observe(before, tokens, parents, ranked.ids, ranked.gaps, np.arange(len(tokens)), self.arrays)
        _observe(before, tokens, parents, ranked.ids, ranked.gaps, nodes, self.arrays)


@njit(cache=True, nogil=True, inline="always")
def pair_slot(before: int, token: int) -> int:
    """Slot of a pair of tokens."""
    mixed = (np.uint64(before) * np.uint64(0x9E3779B97F4A7C15)) ^ (np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F))
    return int((mixed ^ (mixed >> np.uint64(29))) & np.uint64(_PAIR_SLOTS - 1))


@njit(cache=True, nogil=True)
def _observe(
    root_before: int,
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
    ranked: NDArray[np.int32],
    gaps: NDArray[np.float32],
    nodes: NDArray[np.int64],
    arrays: SuccessorArrays,
) -> None:
    for node in nodes:
        if ranked[node, 0] < 0:
            continue
        token = tokens[node]
        before = tokens[parents[node]] if node > 0 else root_before
        slot = pair_slot(before, token)
        arrays.pairs[slot, 0], arrays.pairs[slot, 1] = before, token
        for k in range(min(SUCCESSORS, ranked.shape[1])):
            arrays.ids[token, k] = arrays.pair_ids[slot, k] = ranked[node, k]
            arrays.gaps[token, k] = arrays.pair_gaps[slot, k] = gap_class(gaps[node, k])
