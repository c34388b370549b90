"""The compiled lookup: hash, probe, verify and unfold for all queries and all mapped shards in two calls.

A table row (int64) describes one mapped shard: the addresses and lengths of its arrays. An address of 0 means
that the shard is not mapped here; its queries find nothing. Every index that comes out of a file is checked
before use.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit
from numpy.typing import NDArray

from cluster.retrieval.hashing import extend_hash, fingerprint, home_slot, shard_of, start_hash
from cluster.retrieval.layout import (
    EDGE_AT,
    EDGE_COUNT,
    EDGE_LENGTH_MASK,
    EDGE_LINK,
    EDGE_PARENT_SHIFT,
    INDEX_MASK,
    KEY_SHIFT,
    MAX_NODES,
    TAG_SHIFT,
    TRIE_AT,
    TRIE_BIT,
    TRIE_COUNT,
    TRIE_EDGES,
    TRIE_FIRST_EDGE,
    Int,
)
from cluster.retrieval.pointers import pointer_to_int32, pointer_to_uint64, prefetch

# Columns of a table row.
SLOTS, SLOT_COUNT, HOME_SLOTS, POOL, POOL_SIZE, TRIES, TRIE_ROWS, EDGES, EDGE_ROWS = range(9)
TABLE_COLUMNS = 9

# Columns of a hit.
SIZE, TOTAL, SHARD, TRIE, AT, NODES = range(6)  # TRIE is -1 for a single, which is read from the pool at AT
CANDIDATE, SLOT = 6, 7  # on the way: the number of the size that may match, and its slot
HIT_COLUMNS = 8


@njit(cache=True, nogil=True)
def find(
    queries: NDArray[np.int32],
    lengths: NDArray[np.int32],
    limits: NDArray[np.int32],
    sizes: NDArray[np.int64],
    tables: NDArray[np.int64],
    chain: Int,
    mask: np.uint64,
) -> NDArray[np.int64]:
    """Hits [Q, HIT_COLUMNS] of right-aligned queries [Q, N]; `sizes` fall, the last one is the anchor's.

    `lengths` [Q] are N at most.
    `limits` [Q] bound the nodes of all hits, `chain` those of singles.

    Each round over the queries asks for the memory that the next one reads, so that the cache misses of all
    queries overlap: home slots, trie rows, then edges and pool.
    """
    count = len(queries)
    hits = np.zeros((count, HIT_COLUMNS), np.int64)
    prints = np.empty((count, len(sizes)), np.uint64)
    homes = np.empty((count, len(sizes)), np.int64)
    for q in range(count):
        if limits[q] <= 0:
            hits[q, SHARD] = -1
            continue
        _hash_query(q, queries, lengths, sizes, tables, mask, hits, prints, homes)
    for q in range(count):
        if hits[q, SHARD] >= 0:
            k, slot = _next_candidate(q, 0, -1, lengths, sizes, tables, hits, prints, homes)
            hits[q, CANDIDATE], hits[q, SLOT], hits[q, TRIE] = k, slot, -1
            if slot >= 0:
                _ask_for_candidate(q, tables, hits)
    for q in range(count):
        if hits[q, SHARD] >= 0 and hits[q, TRIE] >= 0:
            _ask_for_trie(tables, hits[q, SHARD], hits[q, TRIE])
    for q in range(count):
        if hits[q, SHARD] >= 0:
            _find_one(q, queries, lengths, sizes, tables, hits, prints, homes)
            if hits[q, SIZE] > 0:
                hits[q, NODES] = _count_nodes(q, tables, hits, min(limits[q], MAX_NODES), chain)
    return hits


@njit(cache=True, nogil=True)
def _hash_query(
    q: Int,
    queries: NDArray[np.int32],
    lengths: NDArray[np.int32],
    sizes: NDArray[np.int64],
    tables: NDArray[np.int64],
    mask: np.uint64,
    hits: NDArray[np.int64],
    prints: NDArray[np.uint64],
    homes: NDArray[np.int64],
) -> None:
    """Fingerprints and home slots for every size that fits the query; its shard, or -1 if not mapped."""
    width, length = queries.shape[1], lengths[q]
    state = start_hash()
    n = 0
    shard = np.int64(-1)
    for k in range(len(sizes) - 1, -1, -1):
        if sizes[k] > length:
            break
        while n < sizes[k]:
            n += 1
            state = extend_hash(state, queries[q, width - n])
        if shard < 0:
            shard = shard_of(state, len(tables))
            if tables[shard, SLOTS] == 0 or tables[shard, SLOT_COUNT] == 0:
                shard = np.int64(-1)
                break
        prints[q, k] = fingerprint(state, n) & mask
        home = home_slot(prints[q, k], np.uint64(tables[shard, HOME_SLOTS]))
        homes[q, k] = min(home, tables[shard, SLOT_COUNT] - 1)
        prefetch(tables[shard, SLOTS] + 8 * homes[q, k])
    hits[q, SHARD] = shard


@njit(cache=True, nogil=True)
def _next_candidate(
    q: Int,
    k: Int,
    slot: Int,
    lengths: NDArray[np.int32],
    sizes: NDArray[np.int64],
    tables: NDArray[np.int64],
    hits: NDArray[np.int64],
    prints: NDArray[np.uint64],
    homes: NDArray[np.int64],
) -> tuple[Int, Int]:
    """The next slot that may be the query's, by its fingerprint: size number and slot, from these on.

    Sizes fall; `slot` -1 means the home slot. The size number is `len(sizes)` when there is none.
    """
    shard = hits[q, SHARD]
    slots = carray(pointer_to_uint64(tables[shard, SLOTS]), tables[shard, SLOT_COUNT])
    while k < len(sizes):
        if sizes[k] <= lengths[q]:
            key = ((prints[q, k] >> TAG_SHIFT) << (TAG_SHIFT - KEY_SHIFT)) | np.uint64(sizes[k])
            for i in range(homes[q, k] if slot < 0 else slot, len(slots)):
                if slots[i] == 0:
                    break
                if slots[i] >> KEY_SHIFT == key:
                    return k, i
        k += 1
        slot = -1
    return k, np.int64(-1)


@njit(cache=True, nogil=True)
def _ask_for_candidate(q: Int, tables: NDArray[np.int64], hits: NDArray[np.int64]) -> None:
    """Prefetch what the candidate's slot points to, and note its trie, if it has one."""
    shard = hits[q, SHARD]
    slots = carray(pointer_to_uint64(tables[shard, SLOTS]), tables[shard, SLOT_COUNT])
    value = slots[hits[q, SLOT]]
    index = np.int64(value & INDEX_MASK)
    if value & TRIE_BIT:
        hits[q, TRIE] = index
        prefetch(tables[shard, TRIES] + 16 * index)
    else:
        prefetch(tables[shard, POOL] + 4 * index)


@njit(cache=True, nogil=True)
def _ask_for_trie(tables: NDArray[np.int64], shard: Int, trie: Int) -> None:
    if trie < tables[shard, TRIE_ROWS]:
        tries = carray(pointer_to_int32(tables[shard, TRIES]), (tables[shard, TRIE_ROWS], 4))
        prefetch(tables[shard, POOL] + 4 * (np.int64(tries[trie, TRIE_AT]) - 1))
        prefetch(tables[shard, EDGES] + 12 * np.int64(tries[trie, TRIE_FIRST_EDGE]))


@njit(cache=True, nogil=True)
def _find_one(
    q: Int,
    queries: NDArray[np.int32],
    lengths: NDArray[np.int32],
    sizes: NDArray[np.int64],
    tables: NDArray[np.int64],
    hits: NDArray[np.int64],
    prints: NDArray[np.uint64],
    homes: NDArray[np.int64],
) -> None:
    """Go through the candidates, the longest first, and note the first n-gram that is really there."""
    shard = hits[q, SHARD]
    slots = carray(pointer_to_uint64(tables[shard, SLOTS]), tables[shard, SLOT_COUNT])
    pool = carray(pointer_to_int32(tables[shard, POOL]), tables[shard, POOL_SIZE])
    tries = carray(pointer_to_int32(tables[shard, TRIES]), (tables[shard, TRIE_ROWS], 4))
    k, i = hits[q, CANDIDATE], hits[q, SLOT]
    while k < len(sizes):
        value, n = slots[i], sizes[k]
        index, trie = np.int64(value & INDEX_MASK), np.int64(-1)
        if value & TRIE_BIT:
            trie = index
            index = np.int64(tries[trie, TRIE_AT]) if trie < len(tries) else np.int64(0)
        if _matching(q, queries, n, pool, index) == n:
            hits[q, SIZE], hits[q, TRIE], hits[q, AT] = n, trie, index
            if trie >= 0:
                hits[q, TOTAL] = tries[trie, TRIE_COUNT]
            else:
                hits[q, TOTAL] = 1
                hits[q, SIZE] = _largest_size(sizes, _matching(q, queries, lengths[q], pool, index))
            return
        k, i = _next_candidate(q, k, i + 1, lengths, sizes, tables, hits, prints, homes)


@njit(cache=True, nogil=True)
def _matching(q: Int, queries: NDArray[np.int32], most: Int, pool: NDArray[np.int32], at: Int) -> Int:
    """How many of the query's last tokens, `most` at most, are those before `at` in the pool."""
    if at > len(pool):
        return 0
    width = queries.shape[1]
    for j in range(1, most + 1):
        if j > at or pool[at - j] != queries[q, width - j] or pool[at - j] < 0:
            return j - 1
    return most


@njit(cache=True, nogil=True)
def _largest_size(sizes: NDArray[np.int64], matched: Int) -> Int:
    for n in sizes:
        if n <= matched:
            return n
    return 0


@njit(cache=True, nogil=True)
def _count_nodes(q: Int, tables: NDArray[np.int64], hits: NDArray[np.int64], limit: Int, chain: Int) -> Int:
    """Nodes to return for a hit."""
    shard = hits[q, SHARD]
    if hits[q, TRIE] < 0:
        pool = carray(pointer_to_int32(tables[shard, POOL]), tables[shard, POOL_SIZE])
        nodes, limit, at = 0, min(limit, chain), hits[q, AT]
        while nodes < limit and at + nodes < len(pool) and pool[at + nodes] >= 0:
            nodes += 1
        return nodes
    first, end = _edge_range(tables, shard, hits[q, TRIE])
    edges = carray(pointer_to_int32(tables[shard, EDGES]), (tables[shard, EDGE_ROWS], 3))
    nodes = 0
    for e in range(first, end):
        length = edges[e, EDGE_LINK] & EDGE_LENGTH_MASK
        if length > 1:  # `unfold` will read them
            prefetch(tables[shard, POOL] + 4 * np.int64(edges[e, EDGE_AT]))
        nodes += length
        if nodes >= limit:
            return limit
    return nodes


@njit(cache=True, nogil=True)
def _edge_range(tables: NDArray[np.int64], shard: Int, trie: Int) -> tuple[Int, Int]:
    tries = carray(pointer_to_int32(tables[shard, TRIES]), (tables[shard, TRIE_ROWS], 4))
    first = np.int64(tries[trie, TRIE_FIRST_EDGE])
    edges = np.int64(tries[trie, TRIE_EDGES])
    if first < 0 or edges < 0 or edges > MAX_NODES or first + edges > tables[shard, EDGE_ROWS]:
        return 0, 0
    return first, first + edges


@njit(cache=True, nogil=True)
def unfold(
    hits: NDArray[np.int64],
    tables: NDArray[np.int64],
    offsets: NDArray[np.int32],
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
    counts: NDArray[np.int32],
    vocabulary: int,
) -> None:
    """Write the tries of all hits into `tokens`, `parents` and `counts`, query q at `offsets[q]`.

    A token outside the vocabulary, which only a damaged file has, becomes 0: a wrong draft, no invalid id.
    """
    ends = np.empty(MAX_NODES + 1, np.int64)  # an edge's last node written, by edge number + 1; 0 is the root
    depths = np.empty(MAX_NODES + 1, np.int64)  # and the depth below which the edge's nodes lie
    for q in range(len(hits)):
        if hits[q, NODES] == 0:
            continue
        shard, start, end = hits[q, SHARD], np.int64(offsets[q]), np.int64(offsets[q + 1])
        if hits[q, TRIE] < 0:
            pool = carray(pointer_to_int32(tables[shard, POOL]), tables[shard, POOL_SIZE])
            for i in range(end - start):
                tokens[start + i] = pool[hits[q, AT] + i]
                parents[start + i] = i - 1
                counts[start + i] = 1
        else:
            _unfold_trie(tables, shard, hits[q, TRIE], start, end, tokens, parents, counts, ends, depths)
    for i in range(len(tokens)):
        if tokens[i] < 0 or tokens[i] >= vocabulary:
            tokens[i] = 0


@njit(cache=True, nogil=True)
def _unfold_trie(
    tables: NDArray[np.int64],
    shard: Int,
    trie: Int,
    start: Int,
    stop: Int,
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
    counts: NDArray[np.int32],
    ends: NDArray[np.int64],
    depths: NDArray[np.int64],
) -> None:
    """Nodes start:stop by count (falling), depth, edge. Edges of one count never descend from each other."""
    first, end = _edge_range(tables, shard, trie)
    pool = carray(pointer_to_int32(tables[shard, POOL]), tables[shard, POOL_SIZE])
    edges = carray(pointer_to_int32(tables[shard, EDGES]), (tables[shard, EDGE_ROWS], 3))
    ends[0], depths[0] = -1, 0
    node = start
    i = first
    while i < end and node < stop:
        j = i
        deepest = np.int64(0)
        lowest = np.int64(1) << 30
        while j < end and edges[j, EDGE_COUNT] == edges[i, EDGE_COUNT]:
            parent = np.int64(edges[j, EDGE_LINK] >> EDGE_PARENT_SHIFT)
            if parent < 0 or parent > i - first:  # only in a damaged file
                parent = np.int64(0)
            number = j - first + 1
            ends[number], depths[number] = ends[parent], depths[parent]
            lowest = min(lowest, depths[number])
            deepest = max(deepest, depths[number] + (edges[j, EDGE_LINK] & EDGE_LENGTH_MASK))
            j += 1
        for depth in range(lowest, deepest):
            for e in range(i, j):
                number = e - first + 1
                step, length = depth - depths[number], np.int64(edges[e, EDGE_LINK] & EDGE_LENGTH_MASK)
                if step < 0 or step >= length:
                    continue
                if node == stop:
                    return
                at = np.int64(edges[e, EDGE_AT]) + step
                if length == 1:
                    tokens[node] = edges[e, EDGE_AT]
                else:
                    tokens[node] = pool[at] if 0 <= at < len(pool) else -1
                parents[node] = ends[number]
                counts[node] = edges[e, EDGE_COUNT]
                ends[number] = node - start
                node += 1
        for e in range(i, j):  # from here on: the depth that the edge's children start from
            depths[e - first + 1] += edges[e, EDGE_LINK] & EDGE_LENGTH_MASK
        i = j
