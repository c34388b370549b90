"""Methods that draft one continuation source alone, or nothing: vanilla, prompt lookup, corpus lookup."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.decoding.corpus_queries import CorpusClient, Queries, dual_queries
from cluster.decoding.drafting import Draft, DraftContext, Drafter
from cluster.decoding.ngram_index import latest_full
from cluster.decoding.tree import CONTEXT, CORPUS, TreeBuilder, add_trie, single_node
from cluster.retrieval.lookup import CorpusLookup, LookupResult


class Vanilla(Drafter):
    """No drafts: every step emits one token."""

    def propose(self, contexts: Sequence[DraftContext], costs: NDArray[np.float64] | None = None) -> list[Draft]:
        return [Draft(single_node(int(c.index.tokens[-1])), retrieved=False) for c in contexts]


class PromptLookup(Drafter):
    """Prompt lookup decoding: the continuation of the latest earlier occurrence of the longest suffix.

    Suffixes of 3 to 1 tokens are tried, ``span`` tokens are drafted as a chain (Saxena 2023).
    """

    def __init__(self, span: int = 10) -> None:
        self._span = span

    def propose(self, contexts: Sequence[DraftContext], costs: NDArray[np.float64] | None = None) -> list[Draft]:
        return [self._propose(c) for c in contexts]

    def _propose(self, context: DraftContext) -> Draft:
        tokens = context.index.tokens
        span = min(self._span, context.capacity - 1, context.max_depth)
        builder = TreeBuilder(context.capacity)
        builder.reset(int(tokens[-1]))
        p, n = latest_full(*context.index.state, tokens[-3:], self._span)
        builder.add_path(tokens[p : p + span] if n else tokens[:0], CONTEXT)
        return Draft(builder.build(), retrieved=n > 0)


class Rest(Drafter):
    """REST (arXiv 2311.08252): what a corpus has behind the longest suffix it knows, as a tree by frequency."""

    def __init__(self, corpus: CorpusLookup) -> None:
        self._corpus = CorpusClient(corpus)

    def ask(self, contexts: Sequence[DraftContext]) -> None:
        self._corpus.ask(self._queries(contexts))

    def propose(self, contexts: Sequence[DraftContext], costs: NDArray[np.float64] | None = None) -> list[Draft]:
        found = self._corpus.answers(self._queries(contexts))
        return [self._propose(c, q, found) for q, c in enumerate(contexts)]

    def _queries(self, contexts: Sequence[DraftContext]) -> Queries:
        room = np.array([c.capacity - 1 for c in contexts], np.int32)
        return dual_queries(contexts, self._corpus.width, 0, room, room)

    def _propose(self, context: DraftContext, query: int, found: LookupResult) -> Draft:
        builder = TreeBuilder(context.capacity)
        builder.reset(int(context.index.tokens[-1]))
        nodes = slice(found.offsets[query], found.offsets[query + 1])
        tokens, parents = found.tokens[nodes], found.parents[nodes]
        sources = np.full(len(tokens), CORPUS, np.int8)
        builder.size = add_trie(*builder.arrays, builder.size, tokens, parents, sources, context.max_depth)
        return Draft(builder.build(), retrieved=bool(found.matched[query]))
