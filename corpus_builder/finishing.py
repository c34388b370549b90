"""From all n-grams of a shard to the shard: pruning, cutting the pool down, placing the slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cluster.retrieval.hashing import home_slot
from cluster.retrieval.layout import (
    EDGE_AT,
    EDGE_COUNT,
    EDGE_LENGTH_MASK,
    EDGE_LINK,
    LOAD_FACTOR,
    SEPARATOR,
    SIZE_SHIFT,
    TAG_SHIFT,
    TRIE_AT,
    TRIE_BIT,
    TRIE_EDGES,
    TRIE_FIRST_EDGE,
)
from cluster.retrieval.manifest import BuildParameters
from cluster.retrieval.shard_file import Shard
from corpus_builder.aggregate import Aggregate
from corpus_builder.sorting import stable_order

ALL_FINGERPRINTS = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Cut:
    """What to keep: n-grams with counts above `min_count`, and those of that count up to a fingerprint."""

    min_count: int = 1
    last_fingerprint: int = ALL_FINGERPRINTS


@dataclass(frozen=True, slots=True)
class Finished:
    """A shard and what is in it."""

    shard: Shard
    ngrams: int
    entries: int


def finish(found: Aggregate, parameters: BuildParameters, cut: Cut) -> Finished:
    """The shard of the n-grams that `cut` keeps; trie nodes seen fewer than `cut.min_count` times go too."""
    kept = _select(found, cut)
    pool, moved = _cut_pool(found.pool, _wanted(found, kept, parameters))
    targets = found.targets[kept.entries]
    rows = targets >= 0
    row_of = np.cumsum(kept.tries) - 1
    targets[rows] = row_of[targets[rows]]
    targets[~rows] = -1 - moved[-1 - targets[~rows]]
    home_slots, slots = place(found.fingerprints[kept.entries], found.sizes[kept.entries], targets)
    tries = found.tries[kept.tries]
    tries[:, TRIE_AT] = moved[tries[:, TRIE_AT]]
    tries[:, TRIE_EDGES] = kept.edges_left[kept.tries]
    tries[:, TRIE_FIRST_EDGE] = np.cumsum(tries[:, TRIE_EDGES]) - tries[:, TRIE_EDGES]
    edges = found.edges[kept.edges]
    long = edges[:, EDGE_LINK] & EDGE_LENGTH_MASK > 1
    edges[long, EDGE_AT] = moved[edges[long, EDGE_AT]]
    shard = Shard(home_slots, slots, pool, tries, edges)
    return Finished(shard, int(found.covered[kept.entries].sum()), len(targets))


def finished_bytes(found: Aggregate, parameters: BuildParameters, cut: Cut) -> int:
    """The size of the arrays that `finish` makes, but for the few slots at the table's end."""
    kept = _select(found, cut)
    pool, _ = _cut_pool(found.pool, _wanted(found, kept, parameters))
    slots = _home_slots(int(kept.entries.sum()))
    return slots * 8 + len(pool) * 4 + int(kept.tries.sum()) * 16 + int(kept.edges.sum()) * 12


@dataclass(frozen=True, slots=True)
class _Kept:
    """Masks over an Aggregate's entries, tries and edges, and how many edges each trie keeps."""

    entries: NDArray[np.bool_]
    tries: NDArray[np.bool_]
    edges: NDArray[np.bool_]
    edges_left: NDArray[np.int32]


def _select(found: Aggregate, cut: Cut) -> _Kept:
    entries = (found.counts > cut.min_count) | (
        (found.counts == cut.min_count) & (found.fingerprints <= np.uint64(cut.last_fingerprint))
    )
    common = found.edges[:, EDGE_COUNT] >= cut.min_count
    edges_left = np.zeros(len(found.tries), np.int32)
    if len(found.tries):
        edges_left = np.add.reduceat(common, found.tries[:, TRIE_FIRST_EDGE], dtype=np.int32)
    rows = found.targets >= 0
    entries[rows] &= edges_left[found.targets[rows]] > 0  # an n-gram whose every continuation is rare answers nothing
    tries = np.zeros(len(found.tries), np.bool_)
    tries[found.targets[entries & rows]] = True
    edges = common & np.repeat(tries, found.tries[:, TRIE_EDGES])
    return _Kept(entries, tries, edges, edges_left)


def _wanted(found: Aggregate, kept: _Kept, parameters: BuildParameters) -> NDArray[np.bool_]:
    """Which pool tokens some kept entry points into."""
    wanted = np.zeros(len(found.pool), np.bool_)
    targets, sizes = found.targets[kept.entries], found.sizes[kept.entries]
    rows = targets >= 0
    _mark_around(wanted, found.pool, -1 - targets[~rows], parameters.sizes[-1], parameters.chain)
    _mark_before(wanted, found.tries[targets[rows], TRIE_AT], sizes[rows])
    _mark_edges(wanted, found.edges[kept.edges])
    return wanted


@njit(cache=True, nogil=True)
def _mark_around(
    wanted: NDArray[np.bool_], pool: NDArray[np.int32], ends: NDArray[np.int64], back: int, depth: int
) -> None:
    """Mark up to `back` tokens before each of `ends` and `depth` from it on, as far as its piece goes."""
    for end in ends:
        for i in range(end - 1, end - 1 - back, -1):
            if pool[i] < 0:
                break
            wanted[i] = True
        for i in range(end, end + depth):
            if pool[i] < 0:
                break
            wanted[i] = True


@njit(cache=True, nogil=True)
def _mark_before(wanted: NDArray[np.bool_], ends: NDArray[np.int32], sizes: NDArray[np.uint8]) -> None:
    for i in range(len(ends)):
        wanted[ends[i] - np.int64(sizes[i]) : ends[i]] = True


@njit(cache=True, nogil=True)
def _mark_edges(wanted: NDArray[np.bool_], edges: NDArray[np.int32]) -> None:
    for e in range(len(edges)):
        length = edges[e, EDGE_LINK] & EDGE_LENGTH_MASK
        if length > 1:
            wanted[edges[e, EDGE_AT] : edges[e, EDGE_AT] + length] = True


@njit(cache=True, nogil=True)
def _cut_pool(pool: NDArray[np.int32], wanted: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The wanted tokens with separators around every piece, and where each index of the old pool went.

    Separators are never wanted, so pieces that were apart stay apart. The old pool ends with one.
    """
    pieces = 0
    for i in range(1, len(pool)):
        pieces += wanted[i] and not wanted[i - 1]
    new = np.empty(wanted.sum() + pieces + 1, np.int32)
    moved = np.zeros(len(pool), np.int32)
    new[0] = SEPARATOR
    k = 1
    for i in range(1, len(pool)):
        if wanted[i]:
            new[k] = pool[i]
        elif wanted[i - 1]:
            new[k] = SEPARATOR
        else:
            continue
        moved[i] = k
        k += 1
    return new, moved


def _home_slots(entries: int) -> int:
    return max(1, round(entries / LOAD_FACTOR))


def place(
    prints: NDArray[np.uint64], sizes: NDArray[np.uint8], targets: NDArray[np.int64]
) -> tuple[int, NDArray[np.uint64]]:
    """The hash table: how many home slots it has, and its slots. Ties keep the order given."""
    home_slots = _home_slots(len(prints))
    homes = _homes(prints, home_slots)
    order = stable_order(homes.astype(np.uint64), home_slots.bit_length())
    tags = (prints >> TAG_SHIFT) << TAG_SHIFT
    rows = targets >= 0
    index = np.where(rows, targets, -1 - targets).astype(np.uint64)
    values = tags | (sizes.astype(np.uint64) << SIZE_SHIFT) | np.where(rows, TRIE_BIT, np.uint64(0)) | index
    return home_slots, _fill(homes[order], values[order], home_slots)


@njit(cache=True, nogil=True)
def _homes(prints: NDArray[np.uint64], home_slots: int) -> NDArray[np.int64]:
    homes = np.empty(len(prints), np.int64)
    for i in range(len(prints)):
        homes[i] = home_slot(prints[i], np.uint64(home_slots))
    return homes


@njit(cache=True, nogil=True)
def _fill(homes: NDArray[np.int64], values: NDArray[np.uint64], home_slots: int) -> NDArray[np.uint64]:
    """Every value in the first free slot from its home up; homes rise, and the last slot stays empty."""
    slots = np.zeros(home_slots + len(homes) + 1, np.uint64)
    free = 0
    for i in range(len(homes)):
        free = max(free, homes[i])
        slots[free] = values[i]
        free += 1
    return slots[: max(free, home_slots) + 1].copy()
