"""Corpora for tests: built in this process without Ray, and what a plain scan of the documents says they hold."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import ray
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from cluster.retrieval import BuildParameters, Corpus, LookupResult, Manifest
from cluster.retrieval.manifest import ShardEntry, TokenizerEntry, corpus_id
from cluster.retrieval.storage import Location
from corpus_builder.finishing import Cut
from corpus_builder.fragments import read_shard, write_fragments
from corpus_builder.job import Job
from corpus_builder.shard_steps import aggregate, write_finished
from corpus_builder.token_file import read_documents, write_tokens

WORDS = 70_000  # of the word tokenizer: more than 16 bits can tell apart

Documents = Sequence[Sequence[int]]
Tries = dict[tuple[int, ...], tuple[int, dict[tuple[int, ...], int]]]


def scan(documents: Documents, sizes: Sequence[int], depth: int) -> Tries:
    """For every n-gram its count and the count of every continuation, by looking at every position."""
    found: dict[tuple[int, ...], tuple[list[int], Counter[tuple[int, ...]]]] = {}
    for document in documents:
        for p in range(1, len(document)):
            for n in sizes:
                if n <= p:
                    total, paths = found.setdefault(tuple(document[p - n : p]), ([0], Counter()))
                    total[0] += 1
                    paths.update(tuple(document[p : p + k]) for k in range(1, min(depth, len(document) - p) + 1))
    return {ngram: (total[0], dict(paths)) for ngram, (total, paths) in found.items()}


def paths_of(result: LookupResult, query: int) -> dict[tuple[int, ...], int]:
    """The count of every path of a query's trie, in the order of its nodes."""
    start, end = result.offsets[query : query + 2]
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(result.tokens[start:end], result.parents[start:end], strict=True):
        assert -1 <= parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), int(token)))
    counts = [int(count) for count in result.counts[start:end]]
    assert len(set(paths)) == len(paths)
    assert counts == sorted(counts, reverse=True)
    return dict(zip(paths, counts, strict=True))


def write_corpus(
    directory: Path, documents: Documents, parameters: BuildParameters, shards: int = 1, cut: Cut | None = None
) -> Corpus:
    """Build a corpus as the builder's workers do, one file of each kind, and open it."""
    directory.mkdir(parents=True, exist_ok=True)
    job = Job(str(directory), "none", None, parameters, shards, 0, True)
    location = Location.parse(directory)
    write_tokens(directory / "tokens-00000.arrow", [np.array(d, np.int32) for d in documents if len(d)], {})
    slices = read_documents(location.child("tokens-00000.arrow"))
    write_fragments(directory / "fragments-00000.arrow", slices, parameters, shards)
    sources = [location.child("fragments-00000.arrow")]
    entries: list[ShardEntry] = []
    for shard in range(shards):
        found = aggregate(*read_shard(sources, shard, shards), parameters)
        entries.append(write_finished(found, job, shard, cut or Cut(parameters.min_count)))
    manifest = Manifest(
        corpus_id=corpus_id("none", [entry.sha256 for entry in entries]),
        tokenizer=TokenizerEntry(name="none", fingerprint="none"),
        vocabulary=1 << 20,
        parameters=parameters,
        documents=len(documents),
        tokens=sum(len(document) for document in documents),
        positions=sum(entry.positions for entry in entries),
        ngrams=sum(entry.ngrams for entry in entries),
        entries=sum(entry.entries for entry in entries),
        shards=tuple(entries),
    )
    (directory / "manifest.json").write_text(manifest.to_json())
    return Corpus.open(directory)


def word_tokenizer(directory: Path) -> str:
    """A saved tokenizer whose word `t123` has id 123; returns its directory as a model name."""
    vocabulary = {f"t{number}": number for number in range(WORDS)}
    tokenizer = Tokenizer(WordLevel({**vocabulary, "?": WORDS}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(directory)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    return str(directory)


def words(tokens: Sequence[int]) -> str:
    """The text that `word_tokenizer` turns into these ids."""
    return " ".join(f"t{token}" for token in tokens)


@contextmanager
def local_ray() -> Iterator[None]:
    """A small Ray cluster in this machine's processes, for the tests of a package."""
    if not ray.is_initialized():
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (Ray spells it so); workers would starve
        ray.init(
            address="local",
            num_cpus=4,
            object_store_memory=100 << 20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    yield
    ray.shutdown()
