"""What drafting needs of a corpus: one interface, whether it is mapped here or asked over actors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Continuation tries of Q queries, flat.

    Attributes:
        matched: int8 [Q], size of the longest n-gram found, 0 where nothing was.
        totals: int32 [Q], how often that n-gram was continued in the corpus; a node's share of it estimates
            how likely the node's path is.
        offsets: int32 [Q + 1]; query q owns the nodes `offsets[q]:offsets[q + 1]`.
        tokens: int32 [N].
        parents: int32 [N], index within the query's own nodes, smaller than the node's; -1 means the root.
        counts: int32 [N], occurrences of the path to the node, falling within a query.
    """

    matched: NDArray[np.int8]
    totals: NDArray[np.int32]
    offsets: NDArray[np.int32]
    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    counts: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.matched)

    @staticmethod
    def empty(queries: int) -> LookupResult:
        """Nothing found for any query."""
        none = np.zeros(0, np.int32)
        return LookupResult(
            np.zeros(queries, np.int8),
            np.zeros(queries, np.int32),
            np.zeros(queries + 1, np.int32),
            none,
            none,
            none,
        )


class PendingLookup(Protocol):
    """A lookup on its way."""

    def collect(self) -> LookupResult:
        """Its result; waits until the deadline at most. May be called once."""
        ...


class CorpusLookup(Protocol):
    """A corpus that can be asked."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """n-gram sizes it knows, rising."""
        ...

    def lookup(
        self, queries: NDArray[np.int32], lengths: NDArray[np.int32], max_nodes: int | NDArray[np.int32]
    ) -> LookupResult:
        """The continuations of the longest suffix of each query that the corpus knows.

        Args:
            queries: [Q, N], right-aligned: the last token in the last column.
            lengths: [Q], tokens of each query that count, the rest is padding.
            max_nodes: most nodes wanted, for all or for each query; the best by count are returned.
        """
        ...

    def submit(
        self, queries: NDArray[np.int32], lengths: NDArray[np.int32], max_nodes: int | NDArray[np.int32]
    ) -> PendingLookup:
        """Begin `lookup` and return at once where it takes a round trip: other work can go on meanwhile.

        The arrays must not change until the result is collected.
        """
        ...


@dataclass(frozen=True, slots=True)
class Finished:
    """A lookup that was answered at once."""

    result: LookupResult

    def collect(self) -> LookupResult:
        return self.result


@dataclass(frozen=True, slots=True)
class Within:
    """A corpus as a model with `vocabulary` token ids may draft from it.

    A corpus can hold ids that the model has not, such as rows of token ids bring in. They become 0: a wrong draft,
    no invalid id.
    """

    corpus: CorpusLookup
    vocabulary: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """See `CorpusLookup`."""
        return self.corpus.sizes

    def lookup(
        self, queries: NDArray[np.int32], lengths: NDArray[np.int32], max_nodes: int | NDArray[np.int32]
    ) -> LookupResult:
        """See `CorpusLookup`."""
        return self._bounded(self.corpus.lookup(queries, lengths, max_nodes))

    def submit(
        self, queries: NDArray[np.int32], lengths: NDArray[np.int32], max_nodes: int | NDArray[np.int32]
    ) -> PendingLookup:
        """See `CorpusLookup`."""
        return _Bounded(self.corpus.submit(queries, lengths, max_nodes), self)

    def _bounded(self, found: LookupResult) -> LookupResult:
        if found.tokens.max(initial=0) < self.vocabulary:
            return found
        return replace(found, tokens=np.where(found.tokens < self.vocabulary, found.tokens, np.int32(0)))


@dataclass(frozen=True, slots=True)
class _Bounded:
    """A lookup of `Within` on its way."""

    pending: PendingLookup
    within: Within

    def collect(self) -> LookupResult:
        return self.within._bounded(self.pending.collect())


def merge(queries: int, parts: Sequence[tuple[NDArray[np.int64], LookupResult]]) -> LookupResult:
    """One result for `queries` queries out of partial ones, each with the numbers of the queries it answers.

    A query must have nodes in one part at most; queries in no part found nothing.
    """
    matched = np.zeros(queries, np.int8)
    totals = np.zeros(queries, np.int32)
    lengths = np.zeros(queries, np.int64)
    starts = np.zeros(queries, np.int64)
    base = 0
    for numbers, part in parts:
        found = part.matched > 0
        chosen = numbers[found]
        matched[chosen] = part.matched[found]
        totals[chosen] = part.totals[found]
        lengths[chosen] = np.diff(part.offsets)[found]
        starts[chosen] = base + part.offsets[:-1][found]
        base += len(part.tokens)
    offsets = np.zeros(queries + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    source = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    return LookupResult(
        matched,
        totals,
        offsets,
        np.concatenate([part.tokens for _, part in parts])[source] if parts else np.zeros(0, np.int32),
        np.concatenate([part.parents for _, part in parts])[source] if parts else np.zeros(0, np.int32),
        np.concatenate([part.counts for _, part in parts])[source] if parts else np.zeros(0, np.int32),
    )


def as_queries(contexts: Sequence[Sequence[int]], width: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Right-aligned queries [Q, width] and their lengths [Q] from the last tokens of each context."""
    queries = np.full((len(contexts), width), -1, np.int32)
    lengths = np.zeros(len(contexts), np.int32)
    for q, context in enumerate(contexts):
        lengths[q] = min(len(context), width)
        if lengths[q]:
            queries[q, width - lengths[q] :] = context[len(context) - lengths[q] :]
    return queries, lengths
