"""Where each n-gram of a sequence occurred: the memory behind prompt lookup and LogitSpec's context queries."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

MAX_NGRAM = 3
_EMPTY = np.int32(-1)


class NgramIndex:
    """Tokens of one sequence and, for n = 1..3, all earlier occurrences of each n-gram, most recent first.

    An occurrence is named by the position p of the token that follows it: tokens[p-n:p] is the n-gram,
    tokens[p:] its continuation. Open-addressing tables hold the latest p of an n-gram, ``previous[n-1, p]``
    links to the one before it. Keys are compared by their tokens, so hash collisions cannot change an answer.
    Appending a token is O(1), memory is about 30 bytes a token.
    """

    def __init__(self, tokens: NDArray[np.int32], room: int = 0) -> None:
        """Index ``tokens`` (int32 [L]) and make room for ``room`` more before the buffers must grow."""
        self._allocate(max(16, len(tokens) + room))
        self._length = 0
        self.extend(tokens)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> NDArray[np.int32]:
        """int32 [L]: a view of the sequence so far."""
        return self._tokens[: self._length]

    @property
    def state(self) -> tuple[NDArray[np.int32], int, NDArray[np.int32], NDArray[np.int32]]:
        """(tokens buffer, length, tables, previous links) for compiled lookups."""
        return self._tokens, self._length, self._tables, self._previous

    def extend(self, tokens: NDArray[np.int32]) -> None:
        """Append ``tokens`` (int32 [L])."""
        needed = self._length + len(tokens)
        if needed > len(self._tokens):
            old = self.tokens
            self._allocate(2 * needed)
            self._length = _append(self._tokens, 0, self._tables, self._previous, old)
        self._length = _append(self._tokens, self._length, self._tables, self._previous, tokens)

    def _allocate(self, capacity: int) -> None:
        slots = 1 << int(2 * capacity - 1).bit_length()  # load factor of one half at most
        self._tokens = np.empty(capacity, np.int32)
        self._tables = np.full((MAX_NGRAM, slots), _EMPTY, np.int32)
        self._previous = np.empty((MAX_NGRAM, capacity), np.int32)


@njit(cache=True, nogil=True, inline="always")
def _mix(value: np.uint64) -> np.uint64:
    # The finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit.
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@njit(cache=True, nogil=True)
def slot_of(tokens: NDArray[np.int32], key: NDArray[np.int32], table: NDArray[np.int32]) -> np.int64:
    """Table slot that holds an occurrence of ``key``, or the empty slot where it belongs."""
    n = len(key)
    h = np.uint64(n)
    for token in key:
        h = _mix(h * np.uint64(0x9E3779B97F4A7C15) + np.uint64(token) + np.uint64(1))
    mask = len(table) - 1
    slot = np.int64(h & np.uint64(mask))
    while True:
        p = table[slot]
        if p < 0:
            return slot
        same = True
        for i in range(n):
            if tokens[p - n + i] != key[i]:
                same = False
                break
        if same:
            return slot
        slot = (slot + 1) & mask


@njit(cache=True, nogil=True)
def _append(
    buffer: NDArray[np.int32],
    length: int,
    tables: NDArray[np.int32],
    previous: NDArray[np.int32],
    tokens: NDArray[np.int32],
) -> int:
    for token in tokens:
        buffer[length] = token
        for n in range(1, min(len(tables), length) + 1):
            table = tables[n - 1]
            slot = slot_of(buffer, buffer[length - n : length], table)
            previous[n - 1, length] = table[slot]
            table[slot] = length
        length += 1
    return length


@njit(cache=True, nogil=True)
def latest_full(
    tokens: NDArray[np.int32],
    length: int,
    tables: NDArray[np.int32],
    previous: NDArray[np.int32],
    key: NDArray[np.int32],
    span: int,
) -> tuple[int, int]:
    """Where to read a continuation of ``key`` (int32 [K]) from, with back-off over its suffixes of n = 3..1 tokens.

    Of an n-gram's occurrences the most recent one with ``span`` tokens after it is taken, else the one with most.
    Returns its position p (continuation is tokens[p : p + span]) and n, or (-1, 0) if no suffix of the key occurred.
    """
    for n in range(min(len(tables), len(key)), 0, -1):
        table = tables[n - 1]
        p = table[slot_of(tokens, key[len(key) - n :], table)]
        if p < 0:
            continue
        while length - p < span and previous[n - 1, p] >= 0:
            p = previous[n - 1, p]
        return p, n
    return -1, 0
