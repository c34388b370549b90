"""Measuring lookups: in place, through actors, and as a corpus grows."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cluster.retrieval import Corpus, CorpusError, CorpusLookup
from cluster.retrieval.storage import Location
from corpus_builder.synthetic import write_synthetic
from corpus_builder.token_file import read_documents

_WARM_UP = 200
_TIMED = 600
_BLOCK = 50  # lookups in a row on one corpus when several are compared


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds a lookup, and what it found."""

    label: str
    median_us: float
    p90_us: float
    matched: float  # share of queries
    nodes: float  # a query

    def __str__(self) -> str:
        return (
            f"{self.label:28} median {self.median_us:7.0f} µs   p90 {self.p90_us:7.0f} µs   "
            f"{self.matched:4.0%} of queries matched, {self.nodes:.1f} nodes each"
        )


class Questions:
    """Batches of queries as a decode step asks them, never the same twice.

    Half of the keys are n-grams of the text, half have another last token, as next-next guesses do.
    """

    def __init__(self, text: NDArray[np.int32], keys: int, width: int, seed: int) -> None:
        self._text = text
        self._keys = keys
        self._width = width
        self._random = np.random.default_rng(seed)
        self._ends = np.flatnonzero(text >= 0)
        self._ends = self._ends[self._ends >= width]

    def batches(self, count: int) -> list[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """Queries [Q, N] and lengths [Q], `count` times."""
        return [self._batch() for _ in range(count)]

    def _batch(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        ends = self._random.choice(self._ends, self._keys)
        queries = self._text[ends[:, None] + np.arange(1 - self._width, 1)]
        guesses = self._text[self._random.choice(self._ends, self._keys // 2)]
        queries[: self._keys // 2, -1] = guesses
        broken = np.cumsum(queries[:, ::-1] < 0, axis=1) > 0  # a document begins in the middle
        return np.ascontiguousarray(queries), (~broken).sum(1).astype(np.int32)


def text_of(directory: str, corpus: Corpus) -> NDArray[np.int32]:
    """A few million tokens of a corpus' documents. Raises CorpusError where they are not kept."""
    files = corpus.manifest.token_files
    if files is None:
        raise CorpusError(f"{directory} was built with --no-keep-tokens; bench takes its queries from the documents")
    location = Location.parse(directory)
    parts: list[NDArray[np.int32]] = [np.full(1, -1, np.int32)]
    for file in files:
        parts += read_documents(location.child(file.name))
        if sum(len(part) for part in parts) > 4_000_000:
            break
    return np.concatenate(parts)


def measure(label: str, corpus: CorpusLookup, questions: Questions, max_nodes: int) -> Timing:
    """Time single lookups."""
    return measure_all([(label, corpus, questions)], max_nodes)[0]


def measure_all(cases: Sequence[tuple[str, CorpusLookup, Questions]], max_nodes: int) -> list[Timing]:
    """Time single lookups on several corpora, block by block in turn, so that they share the machine's moods."""
    batches = [questions.batches(_WARM_UP + _TIMED) for _, _, questions in cases]
    times: list[list[float]] = [[] for _ in cases]
    found = [np.zeros(3) for _ in cases]
    for block in range(0, _WARM_UP + _TIMED, _BLOCK):
        for case, (_, corpus, _) in enumerate(cases):
            for queries, lengths in batches[case][block : block + _BLOCK]:
                start = time.perf_counter()
                result = corpus.lookup(queries, lengths, max_nodes)
                if block >= _WARM_UP:
                    times[case].append(time.perf_counter() - start)
                found[case] += np.array([len(result), np.count_nonzero(result.matched), len(result.tokens)])
    return [
        Timing(
            label,
            float(np.median(times[case]) * 1e6),
            float(np.quantile(times[case], 0.9) * 1e6),
            float(found[case][1] / found[case][0]),
            float(found[case][2] / found[case][0]),
        )
        for case, (label, _, _) in enumerate(cases)
    ]


def growth(millions: Sequence[float], keys: int, max_nodes: int) -> Iterator[Timing]:
    """Timings on synthetic corpora of so many million n-grams, smallest first."""
    with tempfile.TemporaryDirectory() as folder:
        cases: list[tuple[str, CorpusLookup, Questions]] = []
        for number, size in enumerate(sorted(millions)):
            directory = Path(folder) / str(number)
            directory.mkdir()
            manifest, text = write_synthetic(directory, round(size * 1e6))
            label = f"{manifest.ngrams / 1e6:.1f} million n-grams"
            cases.append((label, Corpus.open(directory), Questions(text, keys, 4, number)))
        yield from measure_all(cases, max_nodes)
