"""64-bit n-gram fingerprints: where an n-gram lives. What it is, only its tokens decide."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

FINGERPRINT_MASK = (1 << 64) - 1  # bits that are used; tests narrow it to force collisions

_START = np.uint64(0x243F6A8885A308D3)
_TOKEN_STEP = np.uint64(0x9E3779B97F4A7C15)
_SIZE_STEP = np.uint64(0xD6E8FEB86659FD93)
_SHARD_SALT = np.uint64(0xA0761D6478BD642F)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_LOW_32 = np.uint64(0xFFFFFFFF)


@njit(cache=True, nogil=True, inline="always")
def mix(x: np.uint64) -> np.uint64:
    """A bijection of 64-bit words in which every input bit flips every output bit about half of the time.

    The finalizer of SplitMix64 (Steele, Lea, Flood 2014).
    """
    x = (x ^ (x >> np.uint64(30))) * _MULTIPLIER_1
    x = (x ^ (x >> np.uint64(27))) * _MULTIPLIER_2
    return x ^ (x >> np.uint64(31))


@njit(cache=True, nogil=True, inline="always")
def start_hash() -> np.uint64:
    """The hash of no tokens."""
    return _START


@njit(cache=True, nogil=True, inline="always")
def extend_hash(state: np.uint64, token: np.int32) -> np.uint64:
    """The hash of `token` and then the tokens of `state`: hashing goes from the last token to the first."""
    return mix(state + np.uint64(token + 1) * _TOKEN_STEP)


@njit(cache=True, nogil=True, inline="always")
def fingerprint(state: np.uint64, n: int) -> np.uint64:
    """The fingerprint of an n-gram whose tokens hash to `state`."""
    return mix(state ^ (np.uint64(n) * _SIZE_STEP))


@njit(cache=True, nogil=True, inline="always")
def shard_of(anchor_state: np.uint64, shards: int) -> np.int64:
    """The shard of all n-grams that end in the anchor whose tokens hash to `anchor_state`."""
    return np.int64(mix(anchor_state ^ _SHARD_SALT) % np.uint64(shards))


@njit(cache=True, nogil=True, inline="always")
def home_slot(value: np.uint64, home_slots: np.uint64) -> np.int64:
    """The slot at which the search for a fingerprint begins; `home_slots` is at most 2³²."""
    return np.int64(((value & _LOW_32) * home_slots) >> np.uint64(32))


@njit(cache=True, nogil=True)
def fingerprints_at(pool: NDArray[np.int32], ends: NDArray[np.int64], n: int, mask: np.uint64) -> NDArray[np.uint64]:
    """Fingerprints of the n-grams that end just before the pool indices `ends` [K]."""
    out = np.empty(len(ends), np.uint64)
    for i in range(len(ends)):
        state = start_hash()
        for k in range(1, n + 1):
            state = extend_hash(state, pool[ends[i] - k])
        out[i] = fingerprint(state, n) & mask
    return out


@njit(cache=True, nogil=True)
def shards_at(pool: NDArray[np.int32], ends: NDArray[np.int64], anchor: int, shards: int) -> NDArray[np.int32]:
    """Shards of the n-grams that end before the pool indices `ends` [K], by their last `anchor` tokens."""
    out = np.empty(len(ends), np.int32)
    for i in range(len(ends)):
        state = start_hash()
        for k in range(1, anchor + 1):
            state = extend_hash(state, pool[ends[i] - k])
        out[i] = shard_of(state, shards)
    return out


@njit(cache=True, nogil=True)
def shards_of_queries(
    queries: NDArray[np.int32], lengths: NDArray[np.int32], anchor: int, shards: int
) -> NDArray[np.int32]:
    """Shards of right-aligned queries [Q, N]; -1 where a query is shorter than the anchor."""
    count, width = queries.shape
    out = np.full(count, -1, np.int32)
    for q in range(count):
        if lengths[q] >= anchor:
            state = start_hash()
            for k in range(1, anchor + 1):
                state = extend_hash(state, queries[q, width - k])
            out[q] = shard_of(state, shards)
    return out
