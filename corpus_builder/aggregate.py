"""From the positions of one shard to its n-grams and their tries (docs/corpus.md §5, step 4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.retrieval import hashing
from cluster.retrieval.layout import MAX_POOL
from cluster.retrieval.manifest import BuildParameters
from corpus_builder.sorting import sort_by_continuation, stable_order
from corpus_builder.tries import build_tries

_EDGES_AT_ONCE = 1 << 20  # bound on the edges one call makes room for


@dataclass(frozen=True, slots=True)
class Aggregate:
    """All n-grams of a shard, nothing pruned yet.

    Attributes:
        pool: int32 [P], the shard's text, pieces apart by separators.
        fingerprints: uint64 [N], one for each stored n-gram.
        sizes: uint8 [N].
        counts: int32 [N].
        targets: int64 [N], a row of `tries`, or -1 - p for a single that ends before pool index p.
        covered: uint8 [N], n-grams that this entry answers: a single also stands for longer ones.
        tries: int32 [T, 4].
        edges: int32 [E, 3].
        positions: how many positions went in.
    """

    pool: NDArray[np.int32]
    fingerprints: NDArray[np.uint64]
    sizes: NDArray[np.uint8]
    counts: NDArray[np.int32]
    targets: NDArray[np.int64]
    covered: NDArray[np.uint8]
    tries: NDArray[np.int32]
    edges: NDArray[np.int32]
    positions: int


@dataclass(slots=True)
class _Active:
    """Positions whose n-gram is still to grow, by n-gram and within it by continuation.

    Attributes:
        positions: uint32 [K].
        groups: int64 [K], the number of each position's n-gram.
        suffix_counts: int32 [K], count of the last stored size's n-gram there.
        suffix_tries: int32 [K], its trie.
    """

    positions: NDArray[np.uint32]
    groups: NDArray[np.int64]
    suffix_counts: NDArray[np.int32]
    suffix_tries: NDArray[np.int32]

    def take(self, chosen: NDArray[np.bool_] | NDArray[np.uint32]) -> None:
        """Keep or reorder."""
        self.positions = self.positions[chosen]
        self.groups = self.groups[chosen]
        self.suffix_counts = self.suffix_counts[chosen]
        self.suffix_tries = self.suffix_tries[chosen]


class _Entries:
    """Collects stored n-grams, size by size."""

    def __init__(self, pool: NDArray[np.int32], parameters: BuildParameters) -> None:
        self.pool = pool
        self._parameters = parameters
        self._columns: list[tuple[NDArray[Any], ...]] = []
        self._tries: list[NDArray[np.int32]] = []
        self._edges: list[NDArray[np.int32]] = []
        self._trie_count = 0
        self._edge_count = 0

    def add(
        self,
        n: int,
        ends: NDArray[np.uint32],
        counts: NDArray[np.int32],
        targets: NDArray[np.int64],
        covered: NDArray[np.uint8],
    ) -> None:
        """Store n-grams of size n, each named by one position that has it."""
        mask = np.uint64(hashing.FINGERPRINT_MASK)
        prints = hashing.fingerprints_at(self.pool, ends.astype(np.int64), n, mask)
        self._columns.append((prints, np.full(len(ends), n, np.uint8), counts, targets, covered))

    def add_tries(
        self, positions: NDArray[np.uint32], starts: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> NDArray[np.int32]:
        """Build the tries of runs of positions; returns their numbers."""
        for part in _portions(counts, self._parameters.max_nodes):
            tries, edges = build_tries(
                self.pool,
                positions,
                starts[part],
                counts[part],
                self._parameters.depth,
                self._parameters.max_nodes,
            )
            tries[:, 2] += self._edge_count
            self._edge_count += len(edges)
            self._tries.append(tries)
            self._edges.append(edges)
        first = self._trie_count
        self._trie_count += len(starts)
        return np.arange(first, self._trie_count, dtype=np.int32)

    def finish(self, positions: int) -> Aggregate:
        """Everything collected."""
        prints, sizes, counts, targets, covered = (
            np.concatenate(column) for column in zip(*self._columns, strict=True)
        )
        return Aggregate(
            self.pool,
            prints,
            sizes,
            counts,
            targets,
            covered,
            np.concatenate([np.zeros((0, 4), np.int32), *self._tries]),
            np.concatenate([np.zeros((0, 3), np.int32), *self._edges]),
            positions,
        )


def aggregate(pool: NDArray[np.int32], ends: NDArray[np.uint32], parameters: BuildParameters) -> Aggregate:
    """All n-grams that end before the pool indices `ends`, with their tries.

    Args:
        pool: int32 [P], text pieces between separators, beginning and ending with one.
        ends: uint32 [K], rising; before each there is an anchor, at each a token.
        parameters: sizes, depth and trie size; nothing is pruned here.
    """
    if len(pool) >= MAX_POOL:
        raise ValueError("a shard's text is limited to 2^31 tokens")
    entries = _Entries(pool, parameters)
    count = len(ends)
    active = _Active(
        sort_by_continuation(pool, ends, parameters.depth),
        np.zeros(count, np.int64),
        np.zeros(count, np.int32),
        np.full(count, -1, np.int32),
    )
    token_bits = int(pool.max(initial=0)).bit_length()
    for n in range(1, parameters.sizes[-1] + 1):
        starts = _grow(pool, active, n, token_bits)
        counts = np.diff(starts)
        if n in parameters.sizes:
            _store(entries, active, n, starts[:-1], counts, parameters.sizes)
            more = np.repeat(counts > 1, counts)
            active.groups = np.repeat(np.arange(len(counts)), counts)
            active.take(more)
        else:
            active.groups = np.repeat(np.arange(len(counts)), counts)
    return entries.finish(count)


def _grow(pool: NDArray[np.int32], active: _Active, n: int, token_bits: int) -> NDArray[np.int64]:
    """Take one more token on the left into each n-gram; returns where runs of equal ones start and end."""
    left = pool[active.positions - np.uint32(n)]
    inside = left >= 0
    if not inside.all():
        active.take(inside)
        left = left[inside]
    keys = (active.groups.astype(np.uint64) << np.uint64(token_bits)) | left.astype(np.uint64)
    order = stable_order(keys, int(keys.max(initial=0)).bit_length())
    keys = keys[order]
    active.take(order)
    new = np.flatnonzero(keys[1:] != keys[:-1]) + 1
    return np.concatenate([[0], new, [len(keys)]]) if len(keys) else np.zeros(1, np.int64)


def _store(
    entries: _Entries,
    active: _Active,
    n: int,
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    sizes: tuple[int, ...],
) -> None:
    """Store this size's n-grams, and note their counts and tries at their positions for the next size."""
    single = counts == 1
    ends = active.positions[starts]
    lone = ends[single]
    entries.add(n, lone, np.ones(len(lone), np.int32), -1 - lone.astype(np.int64), _covered(entries, lone, n, sizes))
    tries = np.where(active.suffix_counts[starts] == counts, active.suffix_tries[starts], -1)
    fresh = ~single & (tries < 0)
    tries[fresh] = entries.add_tries(active.positions, starts[fresh], counts[fresh])
    several = ~single
    entries.add(
        n,
        ends[several],
        counts[several].astype(np.int32),
        tries[several].astype(np.int64),
        np.ones(int(several.sum()), np.uint8),
    )
    active.suffix_counts = np.repeat(counts.astype(np.int32), counts)
    active.suffix_tries = np.repeat(tries, counts)


def _covered(entries: _Entries, ends: NDArray[np.uint32], n: int, sizes: tuple[int, ...]) -> NDArray[np.uint8]:
    """Of the sizes from n up, how many have room before each of `ends` in its document."""
    covered = np.ones(len(ends), np.uint8)
    pool = entries.pool
    inside = np.ones(len(ends), bool)
    for size in range(n + 1, sizes[-1] + 1):
        inside &= pool[np.maximum(ends.astype(np.int64) - size, 0)] >= 0
        if size in sizes:
            covered += inside
    return covered


def _portions(counts: NDArray[np.int64], max_nodes: int) -> Iterator[slice]:
    """Slices of runs that make about `_EDGES_AT_ONCE` edges each."""
    bounds = np.cumsum(np.minimum(max_nodes, 2 * counts - 1))
    first = 0
    while first < len(counts):
        before = bounds[first - 1] if first else 0
        end = max(int(np.searchsorted(bounds, before + _EDGES_AT_ONCE, side="right")), first + 1)
        yield slice(first, end)
        first = end
