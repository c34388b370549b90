"""Continuation tries out of sorted positions, best node first, stored as edges (docs/corpus.md §2).

A frontier holds the nodes whose parents are taken. Each is the range of the run (of sorted positions) that
goes through it. The best one is taken until the trie is full; in its place comes the next node of its edge, or
the children that its range splits into at the edge's end.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cluster.retrieval.layout import EDGE_AT, EDGE_COUNT, EDGE_LINK, EDGE_PARENT_SHIFT

# Columns of a frontier item: its range of the run, its depth, its edge's depths, parent and number.
_LO, _HI, _DEPTH, _START, _END, _PARENT, _EDGE = range(7)
_COLUMNS = 7


@njit(cache=True, nogil=True)
def build_tries(
    pool: NDArray[np.int32],
    positions: NDArray[np.uint32],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    depth: int,
    max_nodes: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Tries of the runs `positions[starts[r] : starts[r] + counts[r]]`, each sorted by continuation.

    Returns rows of `tries` [R, 4], edge numbers counting from 0, and the `edges` [E, 3].
    """
    bound, longest = np.minimum(2 * counts - 1, max_nodes).sum(), counts.max()
    tries = np.empty((len(starts), 4), np.int32)
    edges = np.empty((bound, 3), np.int32)
    shared, lengths = np.empty(longest, np.uint8), np.empty(longest, np.uint8)
    items, heap = np.empty((longest + 1, _COLUMNS), np.int64), np.empty(longest + 1, np.int64)
    used = 0
    for r in range(len(starts)):
        run = positions[starts[r] : starts[r] + counts[r]]
        _measure(pool, run, depth, shared, lengths)
        number = _build_one(pool, run, shared, lengths, max_nodes, items, heap, edges[used:])
        tries[r, 0], tries[r, 1], tries[r, 2], tries[r, 3] = run.min(), len(run), used, number
        used += number
    return tries, edges[:used].copy()


@njit(cache=True, nogil=True)
def _measure(
    pool: NDArray[np.int32],
    run: NDArray[np.uint32],
    depth: int,
    shared: NDArray[np.uint8],
    lengths: NDArray[np.uint8],
) -> None:
    """How long each continuation of the run is, and how much of it the one before it shares."""
    for i in range(len(run)):
        x, length = np.int64(run[i]), 0
        while length < depth and pool[x + length] >= 0:
            length += 1
        lengths[i], shared[i] = length, 0
        if i > 0:
            y, common, most = np.int64(run[i - 1]), 0, np.int64(min(length, lengths[i - 1]))
            while common < most and pool[x + common] == pool[y + common]:
                common += 1
            shared[i] = common


@njit(cache=True, nogil=True)
def _build_one(
    pool: NDArray[np.int32],
    run: NDArray[np.uint32],
    shared: NDArray[np.uint8],
    lengths: NDArray[np.uint8],
    max_nodes: int,
    items: NDArray[np.int64],
    heap: NDArray[np.int64],
    edges: NDArray[np.int32],
) -> int:
    """Write the edges of one trie; returns their number."""
    number = 0
    free = 0  # items are taken in order, the root's first; one is given up when its range splits
    size, free = _push_children(0, len(run), 0, 0, shared, lengths, items, heap, 0, free, -1)
    for _ in range(max_nodes):
        if size == 0:
            break
        top = heap[0]
        item = items[top]
        if item[_EDGE] < 0:
            item[_EDGE] = number
            edges[number, EDGE_AT] = run[item[_LO] : item[_HI]].min() + item[_START] - 1
            edges[number, EDGE_COUNT] = item[_HI] - item[_LO]
            edges[number, EDGE_LINK] = item[_PARENT] << EDGE_PARENT_SHIFT
            number += 1
        edges[item[_EDGE], EDGE_LINK] += 1  # the edge's length
        if item[_DEPTH] < item[_END]:
            item[_DEPTH] += 1
            _sift_down(items, heap, size)
            continue
        size -= 1
        heap[0] = heap[size]
        _sift_down(items, heap, size)
        lo, hi, end, edge = item[_LO], item[_HI], item[_END], item[_EDGE]
        size, free = _push_children(lo, hi, end, edge + 1, shared, lengths, items, heap, size, free, top)
    for e in range(number):
        if edges[e, EDGE_LINK] & 0xFF == 1:
            edges[e, EDGE_AT] = pool[edges[e, EDGE_AT]]
    return number


@njit(cache=True, nogil=True)
def _push_children(
    lo: int,
    hi: int,
    depth: int,
    parent: int,
    shared: NDArray[np.uint8],
    lengths: NDArray[np.uint8],
    items: NDArray[np.int64],
    heap: NDArray[np.int64],
    size: int,
    free: int,
    reuse: int,
) -> tuple[int, int]:
    """Put the children of the node at `depth` with range lo:hi into the frontier; returns size and `free`.

    Ranges of frontier items never overlap, so there are at most as many as positions. The item `reuse` is
    taken first, so that items do not run out.
    """
    i = lo
    while i < hi:
        if lengths[i] <= depth:  # this continuation ends here
            i += 1
            continue
        j, end = i + 1, np.int64(lengths[i])
        while j < hi and shared[j] > depth:
            end = min(end, np.int64(shared[j]))
            j += 1
        slot = reuse
        if slot < 0:
            slot = free
            free += 1
        reuse = -1
        item = items[slot]
        item[_LO], item[_HI], item[_DEPTH], item[_START], item[_END] = i, j, depth + 1, depth + 1, end
        item[_PARENT], item[_EDGE] = parent, -1
        heap[size] = slot
        size += 1
        _sift_up(items, heap, size)
        i = j
    return size, free


@njit(cache=True, nogil=True)
def _better(items: NDArray[np.int64], a: int, b: int) -> bool:
    """The order of nodes: count (falling), depth, the depth at which their edges start, tokens."""
    count_a, count_b = items[a, _HI] - items[a, _LO], items[b, _HI] - items[b, _LO]
    if count_a != count_b:
        return count_a > count_b
    if items[a, _DEPTH] != items[b, _DEPTH]:
        return items[a, _DEPTH] < items[b, _DEPTH]
    if items[a, _START] != items[b, _START]:
        return items[a, _START] < items[b, _START]
    return items[a, _LO] < items[b, _LO]


@njit(cache=True, nogil=True)
def _sift_up(items: NDArray[np.int64], heap: NDArray[np.int64], size: int) -> None:
    child = size - 1
    while child > 0:
        parent = (child - 1) // 2
        if not _better(items, heap[child], heap[parent]):
            return
        heap[child], heap[parent] = heap[parent], heap[child]
        child = parent


@njit(cache=True, nogil=True)
def _sift_down(items: NDArray[np.int64], heap: NDArray[np.int64], size: int) -> None:
    parent = 0
    while True:
        child = 2 * parent + 1
        if child >= size:
            return
        if child + 1 < size and _better(items, heap[child + 1], heap[child]):
            child += 1
        if not _better(items, heap[child], heap[parent]):
            return
        heap[child], heap[parent] = heap[parent], heap[child]
        parent = child
