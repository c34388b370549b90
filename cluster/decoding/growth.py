"""Best-first growth of a draft tree by path probability, from the evidence of all sources at once.

Nodes come in the order of falling path probability, so the first N nodes are the best tree of N nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cluster.decoding import evidence as ev
from cluster.decoding.candidates import (
    ROOM,
    Candidates,
    CorpusAnswers,
    Predicted,
    add_context,
    add_corpus,
    add_guesses,
    add_prediction,
    add_successors,
)
from cluster.decoding.successors import SuccessorArrays

_NEW_PER_NODE = 16  # candidates a drafted node brings on average, at most
_FLOOR = 1e-3  # path probability below which nothing is worth a node


class Context(NamedTuple):
    """State of the sequence's ``NgramIndex``."""

    tokens: NDArray[np.int32]
    length: int
    tables: NDArray[np.int32]
    previous: NDArray[np.int32]


class GrownTree(NamedTuple):
    """Buffers for a tree of as many nodes as they are long; the root is set by the caller."""

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    depths: NDArray[np.int32]
    columns: NDArray[np.int8]  # the source that made each node likeliest, as a column of evidence
    probabilities: NDArray[np.float32]  # of the path to each node
    proofs: NDArray[np.int16]  # [N, COLUMNS], buckets of evidence


class _Frontier(NamedTuple):
    """Candidates whose parent is in the tree, and a heap of them by path probability."""

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    chances: NDArray[np.float32]
    proofs: NDArray[np.int16]
    places: NDArray[np.int32]
    heap: NDArray[np.int32]


@njit(cache=True, nogil=True)
def grow(
    context: Context,
    guesses: NDArray[np.int32],
    guess_gaps: NDArray[np.float32],
    successors: SuccessorArrays,
    corpus: CorpusAnswers,
    prediction: Predicted,
    weights: NDArray[np.float32],
    heat: int,
    max_depth: int,
    floor: float,
    tree: GrownTree,
) -> int:
    """Grow a tree and return its size.

    Args:
        context: the tokens so far; the last one is the root.
        guesses: int32 [K], next-next guesses, best first.
        guess_gaps: float32 [K], distance of their logits from the best one.
        successors: what was ranked after tokens earlier.
        corpus: answers to query 1 (index 0) and to query 2 of the first guesses.
        prediction: an output that is expected, and the place in it.
        weights: float32 [WEIGHTS] of the evidence.
        heat: how the target's choices are drawn (``evidence.heat_of``).
        max_depth: deepest node to draft.
        floor: path probability below which a node is not worth drafting.
        tree: receives the nodes.
    """
    capacity = len(tree.tokens)
    tree.probabilities[0] = 1.0
    if capacity == 1 or max_depth == 0:
        return 1
    candidates = Candidates(
        np.empty(ROOM, np.int32), np.empty((ROOM, ev.COLUMNS), np.int16), np.empty((ROOM, 3), np.int32)
    )
    most = ROOM + _NEW_PER_NODE * capacity
    frontier = _Frontier(
        np.empty(most, np.int32),
        np.empty(most, np.int32),
        np.empty(most, np.float32),
        np.empty((most, ev.COLUMNS), np.int16),
        np.empty((most, 3), np.int32),
        np.empty(most, np.int32),
    )
    places = np.empty((capacity, 3), np.int32)
    places[0] = -1
    if len(prediction.tokens):
        places[0, 2] = prediction.at
    key = np.empty(ev.LONGEST_MATCH, np.int32)
    estimates = np.empty(ROOM, np.float32)
    made, waiting, size, node = 0, 0, 1, 0
    while True:
        if tree.depths[node] < max_depth:
            path = key[_fill_key(key, context, tree, node) :]
            count = add_context(path, context.tokens, context.tables, context.previous, candidates)
            if node == 0:
                count = add_guesses(guesses, guess_gaps, candidates, count)
            count = add_successors(path, successors, candidates, count)
            count = add_corpus(corpus, guesses, tree.tokens[node], tree.depths[node], places[node], candidates, count)
            count = add_prediction(prediction, tree.depths[node], places[node, 2], candidates, count)
            _estimate(candidates, count, weights, tree.depths[node], heat, prediction.share, estimates)
            for c in range(count):
                chance = tree.probabilities[node] * estimates[c]
                if chance >= max(floor, _FLOOR) and made < most:
                    frontier.tokens[made], frontier.parents[made] = candidates.tokens[c], node
                    frontier.chances[made] = chance
                    frontier.proofs[made], frontier.places[made] = candidates.proofs[c], candidates.places[c]
                    waiting = _push(frontier.heap, waiting, frontier.chances, made)
                    made += 1
        if waiting == 0 or size == capacity:
            return size
        best = frontier.heap[0]
        waiting = _pop(frontier.heap, waiting, frontier.chances)
        node = size
        tree.tokens[node], tree.parents[node] = frontier.tokens[best], frontier.parents[best]
        tree.depths[node] = tree.depths[tree.parents[node]] + 1
        tree.columns[node] = _strongest(frontier.proofs[best], weights)
        tree.probabilities[node], tree.proofs[node] = frontier.chances[best], frontier.proofs[best]
        places[node] = frontier.places[best]
        size += 1


@njit(cache=True, nogil=True)
def _fill_key(key: NDArray[np.int32], context: Context, tree: GrownTree, node: int) -> int:
    """Write the last tokens of the path to a node, right-aligned; returns where they begin."""
    at = len(key)
    while node > 0 and at > 0:  # the root is the context's last token
        at -= 1
        key[at] = tree.tokens[node]
        node = tree.parents[node]
    back = context.length
    while back > 0 and at > 0:
        at -= 1
        back -= 1
        key[at] = context.tokens[back]
    return at


@njit(cache=True, nogil=True)
def _estimate(
    candidates: Candidates,
    count: int,
    weights: NDArray[np.float32],
    depth: int,
    heat: int,
    share: float,
    estimates: NDArray[np.float32],
) -> None:
    """P(accepted | parent accepted) of each candidate, together 1 at most.

    A predicted token is no likelier than the ``share`` of them that come true, whatever agrees: most that agrees was
    copied from the same text. The others, weighed as if there were no prediction, share what it leaves.
    """
    predicted, others = 0.0, 0.0
    for c in range(count):
        candidates.proofs[c, ev.DEPTH] = ev.depth_bucket(depth, heat)
        estimates[c] = estimate(candidates.proofs[c], weights)
        if candidates.proofs[c, ev.PREDICTION] != ev.OFFSETS[ev.PREDICTION]:
            estimates[c] = min(estimates[c], share)
            predicted = estimates[c]
        else:
            others += estimates[c]
    room = 1.0 - predicted
    scale = room / others if others > room else 1.0
    for c in range(count):
        if candidates.proofs[c, ev.PREDICTION] == ev.OFFSETS[ev.PREDICTION]:
            estimates[c] *= scale


@njit(cache=True, nogil=True, inline="always")
def estimate(proof: NDArray[np.int16], weights: NDArray[np.float32]) -> float:
    """Logistic function of the weights of a candidate's buckets."""
    score = 0.0
    for column in range(ev.COLUMNS):
        score += weights[proof[column]]
    return 1.0 / (1.0 + np.exp(-score))


@njit(cache=True, nogil=True)
def _strongest(proof: NDArray[np.int16], weights: NDArray[np.float32]) -> int:
    """The column whose evidence raises a candidate's estimate most."""
    best, most = 1, -np.inf
    for column in range(1, ev.COLUMNS):
        absent = ev.OFFSETS[column]
        if proof[column] != absent and weights[proof[column]] - weights[absent] > most:
            best, most = column, weights[proof[column]] - weights[absent]
    return best


@njit(cache=True, nogil=True)
def _push(heap: NDArray[np.int32], size: int, chances: NDArray[np.float32], item: int) -> int:
    """Add an item to a binary heap with the likeliest on top; returns the new size."""
    at = size
    while at > 0 and chances[heap[(at - 1) // 2]] < chances[item]:
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = item
    return size + 1


@njit(cache=True, nogil=True)
def _pop(heap: NDArray[np.int32], size: int, chances: NDArray[np.float32]) -> int:
    """Remove the top of the heap; returns the new size."""
    size -= 1
    item, at = heap[size], 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and chances[heap[child + 1]] > chances[heap[child]]:
            child += 1
        if chances[heap[child]] <= chances[item]:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = item
    return size
