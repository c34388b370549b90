"""A method's queries to the corpus: sent as soon as they are known, the answers taken when they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.decoding.drafting import DraftContext
from cluster.retrieval.lookup import CorpusLookup, LookupResult, PendingLookup


@dataclass(frozen=True, slots=True)
class Queries:
    """What a step asks the corpus: query 1 of each sequence, followed by its query 2 for its first guesses.

    Attributes:
        queries: int32 [Q, N], right-aligned tokens.
        lengths: int32 [Q], how many of them count.
        room: int32 [Q], most nodes of each answer.
        first: int64 [B], where each sequence's queries begin.
        asked: int64 [B], guesses of each sequence that are asked about.
    """

    queries: NDArray[np.int32]
    lengths: NDArray[np.int32]
    room: NDArray[np.int32]
    first: NDArray[np.int64]
    asked: NDArray[np.int64]

    def same_as(self, other: Queries) -> bool:
        """Whether the same answers answer both."""
        return (
            np.array_equal(self.queries, other.queries)
            and np.array_equal(self.lengths, other.lengths)
            and np.array_equal(self.room, other.room)
        )


class CorpusClient:
    """Asks a corpus ahead.

    What the next step wants to know is known when its root tokens are. What the engine does until it drafts (handing
    the tokens out, taking requests in, planning) hides the round trip to a corpus that is held elsewhere.
    """

    def __init__(self, corpus: CorpusLookup) -> None:
        self._corpus = corpus
        self._pending: tuple[Queries, PendingLookup] | None = None

    @property
    def width(self) -> int:
        """Tokens of a query."""
        return max(self._corpus.sizes)

    def ask(self, queries: Queries) -> None:
        """Send queries; what was asked before and not fetched is forgotten."""
        if self._pending is not None:
            self._pending[1].collect()  # or its answers would be kept for ever
        self._pending = queries, self._corpus.submit(queries.queries, queries.lengths, queries.room)

    def answers(self, queries: Queries) -> LookupResult:
        """The answers to queries that were sent ahead or, where the batch is another one by now, are sent now."""
        if self._pending is None or not self._pending[0].same_as(queries):
            self.ask(queries)
        assert self._pending is not None
        pending, self._pending = self._pending[1], None
        return pending.collect()


def dual_queries(
    contexts: Sequence[DraftContext],
    width: int,
    most_guesses: int,
    room: NDArray[np.int32],
    guess_room: NDArray[np.int32],
) -> Queries:
    """The queries of B sequences.

    Args:
        contexts: the sequences.
        width: tokens of a query.
        most_guesses: guesses of each that are asked about, if it has so many.
        room, guess_room: int32 [B], most nodes of the answers to query 1 and to each query 2.
    """
    last, counts = last_tokens(contexts, width)
    asked = np.array([min(len(c.guesses), most_guesses) for c in contexts], np.int64)
    owner = np.repeat(np.arange(len(contexts)), 1 + asked)
    queries, lengths, nodes = last[owner], counts[owner], guess_room[owner]
    first = np.cumsum(1 + asked) - (1 + asked)
    nodes[first] = room
    is_guess = np.ones(len(owner), np.bool_)
    is_guess[first] = False
    queries[is_guess, :-1] = queries[is_guess, 1:]
    queries[is_guess, -1] = np.concatenate([c.guesses[:n] for c, n in zip(contexts, asked, strict=True)])
    lengths[is_guess] = np.minimum(lengths[is_guess] + 1, width)
    return Queries(queries, lengths, nodes, first, asked)


def last_tokens(contexts: Sequence[DraftContext], width: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Right-aligned last tokens int32 [B, width], and how many of them count int32 [B]."""
    queries = np.zeros((len(contexts), width), np.int32)
    lengths = np.array([min(width, len(c.index)) for c in contexts], np.int32)
    for row, n, context in zip(queries, lengths, contexts, strict=True):
        row[width - n :] = context.index.tokens[len(context.index) - n :]
    return queries, lengths
