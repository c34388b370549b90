"""Corpora of any size out of random tokens, to measure lookups on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cluster.retrieval import BuildParameters, Manifest
from cluster.retrieval.layout import SEPARATOR
from cluster.retrieval.manifest import MANIFEST_NAME, ShardEntry, TokenizerEntry, corpus_id
from cluster.retrieval.shard_file import write_shard
from cluster.retrieval.storage import Location
from corpus_builder.aggregate import aggregate
from corpus_builder.finishing import Cut, finish
from corpus_builder.work_files import put

VOCABULARY = 49_152
_DOCUMENT = 500  # tokens
_NGRAMS_A_TOKEN = 2.36  # that random tokens make, about


def random_tokens(count: int, seed: int) -> NDArray[np.int32]:
    """Documents of `_DOCUMENT` tokens with a separator around each; ranks are distributed as in text (Zipf)."""
    random = np.random.default_rng(seed)
    ranks = np.exp(random.random(count) * np.log(VOCABULARY)).astype(np.int32) - 1
    ranks[:: _DOCUMENT + 1] = SEPARATOR
    return np.append(ranks, np.int32(SEPARATOR))


def write_synthetic(directory: Path, ngrams: int) -> tuple[Manifest, NDArray[np.int32]]:
    """A corpus of one shard with about that many n-grams; returns its manifest and its text."""
    parameters = BuildParameters()
    pool = random_tokens(round(ngrams / _NGRAMS_A_TOKEN), ngrams)
    ends = (np.flatnonzero((pool[1:] >= 0) & (pool[:-1] >= 0)) + 1).astype(np.uint32)
    made = finish(aggregate(pool, ends, parameters), parameters, Cut())
    target = Location.parse(directory).child("shard-00000.arrow")
    file = put(target, lambda path: write_shard(path, 0, made.shard, {}))
    shard = ShardEntry(**file.model_dump(), positions=len(ends), ngrams=made.ngrams, entries=made.entries)
    manifest = Manifest(
        corpus_id=corpus_id("synthetic", [shard.sha256]),
        tokenizer=TokenizerEntry(name="synthetic", fingerprint="synthetic"),
        vocabulary=VOCABULARY,
        parameters=parameters,
        documents=-(-len(pool) // (_DOCUMENT + 1)),
        tokens=int((pool >= 0).sum()),
        positions=len(ends),
        ngrams=made.ngrams,
        entries=made.entries,
        shards=(shard,),
    )
    (directory / MANIFEST_NAME).write_text(manifest.to_json())
    return manifest, pool
