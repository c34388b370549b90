"""Stable sorts of positions, in time linear in their number: by 64-bit keys and by what follows them."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

_DIGIT = 11  # bits sorted at a time: the counters stay in the first-level cache
_SHORT = 8  # runs up to this length are sorted by insertion


@njit(cache=True, nogil=True)
def stable_order(keys: NDArray[np.uint64], bits: int) -> NDArray[np.uint32]:
    """The stable sorting order [N] of keys [N] of which only the low `bits` bits are in use."""
    a, b = keys.copy(), np.empty_like(keys)
    order, spare = np.arange(len(keys)).astype(np.uint32), np.empty(len(keys), np.uint32)
    low = np.uint64((1 << _DIGIT) - 1)
    for shift in range(0, bits, _DIGIT):
        s = np.uint64(shift)
        starts = np.zeros((1 << _DIGIT) + 1, np.int64)
        for key in a:
            starts[np.int64((key >> s) & low) + 1] += 1
        starts = np.cumsum(starts)
        for i in range(len(a)):
            digit = np.int64((a[i] >> s) & low)
            b[starts[digit]] = a[i]
            spare[starts[digit]] = order[i]
            starts[digit] += 1
        a, b, order, spare = b, a, spare, order
    return order


def sort_by_continuation(pool: NDArray[np.int32], positions: NDArray[np.uint32], depth: int) -> NDArray[np.uint32]:
    """`positions` sorted by the up to `depth` tokens from each on, to the next separator; ties by position.

    `positions` must rise, and `pool` must end with a separator.
    """
    width = int(pool.max(initial=0) + 1).bit_length()
    first = pool[positions] + 1
    second = np.where(first > 0, pool[np.minimum(positions + 1, len(pool) - 1)] + 1, 0)
    keys = (first.astype(np.uint64) << np.uint64(width)) | second.astype(np.uint64)
    del first, second
    order = stable_order(keys, 2 * width)
    ordered = positions[order]
    _sort_runs(pool, ordered, keys[order], depth)
    return ordered


@njit(cache=True, nogil=True)
def _sort_runs(pool: NDArray[np.int32], order: NDArray[np.uint32], keys: NDArray[np.uint64], depth: int) -> None:
    """Sort, in place, each run of positions whose first two tokens are equal by the tokens after those."""
    spare = np.empty(len(order), np.uint32)
    i = 0
    while i < len(order):
        j = i + 1
        while j < len(order) and keys[j] == keys[i]:
            j += 1
        if j - i > 1:
            _merge_sort(pool, order[i:j], spare, depth)
        i = j


@njit(cache=True, nogil=True)
def _merge_sort(pool: NDArray[np.int32], run: NDArray[np.uint32], spare: NDArray[np.uint32], depth: int) -> None:
    n = len(run)
    for start in range(0, n, _SHORT):
        for i in range(start + 1, min(start + _SHORT, n)):
            moved, j = run[i], i - 1
            while j >= start and _before(pool, moved, run[j], depth):
                run[j + 1] = run[j]
                j -= 1
            run[j + 1] = moved
    width = _SHORT
    while width < n:
        for start in range(0, n - width, 2 * width):
            _merge(pool, run[start : min(start + 2 * width, n)], width, spare, depth)
        width *= 2


@njit(cache=True, nogil=True)
def _merge(
    pool: NDArray[np.int32], run: NDArray[np.uint32], middle: int, spare: NDArray[np.uint32], depth: int
) -> None:
    """Merge the sorted halves run[:middle] and run[middle:] in place."""
    if not _before(pool, run[middle], run[middle - 1], depth):
        return
    for i in range(middle):
        spare[i] = run[i]
    i, j, k = 0, middle, 0
    while i < middle:
        if j < len(run) and _before(pool, run[j], spare[i], depth):
            run[k] = run[j]
            j += 1
        else:
            run[k] = spare[i]
            i += 1
        k += 1


@njit(cache=True, nogil=True)
def _before(pool: NDArray[np.int32], x: np.uint32, y: np.uint32, depth: int) -> bool:
    """Whether x sorts before y, two positions whose first two tokens are equal."""
    a, b = np.int64(x), np.int64(y)
    for k in range(min(depth, 2)):
        if pool[a + k] < 0:
            return bool(a < b)
    for k in range(2, depth):
        if pool[a + k] != pool[b + k]:
            return bool(pool[a + k] < pool[b + k])
        if pool[a + k] < 0:
            break
    return bool(a < b)
