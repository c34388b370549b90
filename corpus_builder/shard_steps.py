"""Steps 3 and 4 of a build, as Ray Data's workers run them: token files to fragments, fragments to shards.

This module does not load what only tokenizing needs, to keep the workers small.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from cluster.retrieval.manifest import FileEntry, ShardEntry
from cluster.retrieval.shard_file import write_shard
from cluster.retrieval.storage import Location
from corpus_builder.aggregate import Aggregate, aggregate
from corpus_builder.finishing import Cut, finish, finished_bytes
from corpus_builder.fragments import read_shard, read_totals, write_fragments
from corpus_builder.job import Job
from corpus_builder.token_file import read_documents
from corpus_builder.work_files import entry_of, exists, open_arrow, put

_COUNTS = b"logitspec.counts"


class FragmentStep:
    """Makes the fragment file of one token file a call."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def run(self, number: int, argument: Any) -> list[tuple[int, int]]:
        """`argument` names the token file; the result counts text and positions for each shard."""
        job, target = self._job, self._job.fragment_file(number)
        if not exists(target):
            slices = read_documents(Location.parse(argument))
            put(target, lambda path: write_fragments(path, slices, job.parameters, job.shards))
        return read_totals(target, job.shards)


class AggregateStep:
    """Makes one shard a call; with a size budget its unpruned form, for `MeasureStep` and `PruneStep`."""

    def __init__(self, job: Job, token_files: int) -> None:
        self._job = job
        self._sources = [job.fragment_file(number) for number in range(token_files)]

    def run(self, number: int, argument: Any) -> dict[str, Any] | None:
        """The result is the shard's entry, or None for an unpruned form."""
        job = self._job
        if job.parameters.max_bytes is None:
            target = job.shard_file(number)
            if exists(target):
                return _known(target).model_dump()
            cut = Cut(job.parameters.min_count)
            return write_finished(self._aggregate(number), job, number, cut).model_dump()
        target = job.aggregate_file(number)
        if not exists(target):
            put(target, lambda path: _save(path, self._aggregate(number)))
        return None

    def _aggregate(self, shard: int) -> Aggregate:
        pool, ends = read_shard(self._sources, shard, self._job.shards)
        return aggregate(pool, ends, self._job.parameters)


class MeasureStep:
    """How large a shard would be under several cuts."""

    def __init__(self, job: Job, cuts: Sequence[Cut]) -> None:
        self._job = job
        self._cuts = cuts

    def run(self, number: int, argument: Any) -> list[int]:
        """The result is the shard's size under each cut."""
        found = _load(self._job.aggregate_file(number))
        return [finished_bytes(found, self._job.parameters, cut) for cut in self._cuts]


class PruneStep:
    """Makes one shard a call out of its unpruned form."""

    def __init__(self, job: Job, cut: Cut) -> None:
        self._job = job
        self._cut = cut

    def run(self, number: int, argument: Any) -> dict[str, Any]:
        """The result is the shard's entry."""
        found = _load(self._job.aggregate_file(number))
        return write_finished(found, self._job, number, self._cut).model_dump()


def write_finished(found: Aggregate, job: Job, shard: int, cut: Cut) -> ShardEntry:
    """Finish a shard and write its file."""
    made = finish(found, job.parameters, cut)
    counts = json.dumps([found.positions, made.ngrams, made.entries])
    notes = {_COUNTS: counts.encode()}
    file = put(job.shard_file(shard), lambda path: write_shard(path, shard, made.shard, notes))
    return _entry(file, counts)


def _entry(file: FileEntry, counts: str) -> ShardEntry:
    positions, ngrams, entries = json.loads(counts)
    return ShardEntry(**file.model_dump(), positions=positions, ngrams=ngrams, entries=entries)


def _known(target: Location) -> ShardEntry:
    """The entry of a shard file that an earlier, broken-off build finished."""
    with open_arrow(target) as reader:
        counts = (reader.schema.metadata or {})[_COUNTS].decode()
    return _entry(entry_of(target), counts)


def _save(path: Path, found: Aggregate) -> None:
    with path.open("wb") as file:
        np.savez(file, **{field.name: getattr(found, field.name) for field in fields(Aggregate)})


def _load(source: Location) -> Aggregate:
    with np.load(io.BytesIO(source.read_bytes())) as arrays:
        columns = {name: arrays[name] for name in arrays.files}
    return Aggregate(**{**columns, "positions": int(columns["positions"])})
