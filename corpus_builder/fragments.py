"""The shuffle: for each shard, the pieces of text around its positions (docs/corpus.md §5, step 3).

A fragment file has one row for each slice of about a million tokens and each shard. A shard's fragments, in the
order of files and slices, put end to end, are its pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numba import njit
from numpy.typing import NDArray

from cluster.retrieval import BuildParameters, CorpusError
from cluster.retrieval.hashing import extend_hash, shard_of, start_hash
from cluster.retrieval.layout import MAX_POOL, SEPARATOR
from cluster.retrieval.storage import Location
from corpus_builder.work_files import open_arrow

_SCHEMA = pa.schema([("text", pa.large_list(pa.int32())), ("ends", pa.large_list(pa.int32()))])


def write_fragments(path: Path, slices: Iterable[NDArray[np.int32]], parameters: BuildParameters, shards: int) -> None:
    """Write a fragment file of the documents in `slices` (as `read_documents` gives them)."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, _SCHEMA) as writer:
        for flat in slices:
            text, ends, bounds = _fragments(flat, parameters.sizes[0], parameters.sizes[-1], parameters.depth, shards)
            for shard in range(shards):
                (a, b), (c, d) = bounds[0, shard : shard + 2], bounds[1, shard : shard + 2]
                columns = [
                    pa.LargeListArray.from_arrays(pa.array([0, len(part)], pa.int64()), pa.array(part))
                    for part in (text[a:b], ends[c:d])
                ]
                writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))


def read_totals(source: Location, shards: int) -> list[tuple[int, int]]:
    """How many tokens of text and how many positions a fragment file has for each shard."""
    totals = [(0, 0)] * shards
    with open_arrow(source) as reader:
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            text, ends = totals[number % shards]
            totals[number % shards] = (text + len(batch.column(0).values), ends + len(batch.column(1).values))
    return totals


def read_shard(sources: Sequence[Location], shard: int, shards: int) -> tuple[NDArray[np.int32], NDArray[np.uint32]]:
    """The pool and positions of a shard, as `aggregate` takes them, out of all fragment files in order."""
    text: list[NDArray[np.int32]] = []
    ends: list[NDArray[np.uint32]] = []
    base = 0
    for piece, places in _shard_rows(sources, shard, shards):
        text.append(piece)
        ends.append((places + base).astype(np.uint32))
        base += len(piece)
        if base >= MAX_POOL - 2:
            raise CorpusError(f"shard {shard} would hold more than 2^31 tokens; build with more --shards")
    last = np.full(2 - min(base, 1), SEPARATOR, np.int32)
    return np.concatenate([*text, last]), np.concatenate([np.zeros(0, np.uint32), *ends])


def _shard_rows(
    sources: Sequence[Location], shard: int, shards: int
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int64]]]:
    for source in sources:
        with open_arrow(source) as reader:
            for number in range(shard, reader.num_record_batches, shards):
                batch = reader.get_batch(number)
                places = batch.column(1).values.to_numpy().astype(np.int64)
                yield batch.column(0).values.to_numpy().copy(), places


@njit(cache=True, nogil=True)
def _fragments(
    flat: NDArray[np.int32], anchor: int, back: int, depth: int, shards: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    """All shards' text and ends, shard after shard, and where each shard's begin (bounds [2, shards + 1]).

    Round 0 measures, round 1 writes. A window, up to `back` tokens before its position and `depth` from it
    on, goes on in the piece of the shard's window before it where they touch; else a separator comes first.
    """
    owner = _owners(flat, anchor, shards)
    bounds = np.zeros((2, shards + 1), np.int64)
    text, ends = np.empty(0, np.int32), np.empty(0, np.int32)
    for writing in range(2):
        if writing:
            bounds[0], bounds[1] = np.cumsum(bounds[0]), np.cumsum(bounds[1])
            text, ends = np.empty(bounds[0, shards], np.int32), np.empty(bounds[1, shards], np.int32)
        copied = np.full(shards, -1, np.int64)  # up to where the slice is copied, by shard
        at, end_at = bounds[0, :shards].copy(), bounds[1, :shards].copy()
        for p in range(len(flat)):
            s = owner[p]
            if s < 0:
                continue
            lo, hi = p - 1, p + 1
            while p - lo < back and lo > 0 and flat[lo - 1] >= 0:
                lo -= 1
            while hi - p < depth and hi < len(flat) and flat[hi] >= 0:
                hi += 1
            if not writing:
                bounds[0, s + 1] += hi - max(lo, copied[s]) + (1 if lo > copied[s] else 0)
                bounds[1, s + 1] += 1
                copied[s] = hi
                continue
            if lo > copied[s]:
                text[at[s]] = SEPARATOR
                at[s] += 1
                copied[s] = lo
            while copied[s] < hi:
                text[at[s]] = flat[copied[s]]
                at[s] += 1
                copied[s] += 1
            ends[end_at[s]] = at[s] - bounds[0, s] - (hi - p)
            end_at[s] += 1
    return text, ends, bounds


@njit(cache=True, nogil=True)
def _owners(flat: NDArray[np.int32], anchor: int, shards: int) -> NDArray[np.int32]:
    """The shard of every position in a slice; -1 where there is no token or no anchor before it."""
    owner = np.full(len(flat), -1, np.int32)
    run = 0  # tokens since the last separator
    for p in range(len(flat)):
        if flat[p] < 0:
            run = 0
            continue
        if run >= anchor:
            state = start_hash()
            for k in range(1, anchor + 1):
                state = extend_hash(state, flat[p - k])
            owner[p] = shard_of(state, shards)
        run += 1
    return owner
