"""LogitSpec (arXiv 2507.01449) as published, and its extension by a reference corpus."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cluster.decoding.corpus_queries import CorpusClient, Queries, dual_queries
from cluster.decoding.drafting import Draft, DraftContext, Drafter
from cluster.decoding.ngram_index import latest_full
from cluster.decoding.tree import CONTEXT, CORPUS, NEXT_NEXT, TreeBuilder, add_path, add_trie
from cluster.retrieval.lookup import CorpusLookup, LookupResult

SPAN = 20  # tokens of LogitSpec's query 1 continuation, as published
SURE = 0.8  # share of a corpus n-gram's occurrences that must go on alike for a guess to be extended so


class LogitSpec(Drafter):
    """LogitSpec (arXiv 2507.01449) with its published rule, from context n-grams and, where there is one, a corpus.

    Query 1 looks up what followed the n-gram ending in x(i+1); every guess of the next-next token x(i+2) is a child
    of the root, extended by what followed the n-gram ending in x(i+1), x(i+2) (query 2). Continuations are cut by the
    rank of their guess. The tree is filled in that order until its capacity is used up.

    With a corpus both queries are asked there too. The longer match is believed more, the context at a tie: for query 1
    it comes first and the other gets part of the room, and it extends a guess alone. The corpus does that only as far
    as nearly all it has seen goes on alike, for what it does not know fills the tree as well as what it knows.
    """

    def __init__(self, corpus: CorpusLookup | None = None) -> None:
        self._corpus = None if corpus is None else CorpusClient(corpus)

    def guesses_wanted(self, capacity: int) -> int:
        return capacity - 1

    def ask(self, contexts: Sequence[DraftContext]) -> None:
        if self._corpus is not None:
            self._corpus.ask(self._queries(self._corpus.width, contexts))

    def propose(self, contexts: Sequence[DraftContext], costs: NDArray[np.float64] | None = None) -> list[Draft]:
        if self._corpus is None:
            return [self._propose(c, 0, 0, LookupResult.empty(1)) for c in contexts]
        queries = self._queries(self._corpus.width, contexts)
        found = self._corpus.answers(queries)
        asked = zip(contexts, queries.first.tolist(), queries.asked.tolist(), strict=True)
        return [self._propose(c, q, n, found) for c, q, n in asked]

    def _queries(self, width: int, contexts: Sequence[DraftContext]) -> Queries:
        room = np.array([self.chain_length(c.capacity) for c in contexts], np.int32)
        guess_room = np.full(len(contexts), tokens_by_rank(1) - 1, np.int32)
        return dual_queries(contexts, width, _EXTENDED_RANKS, room, guess_room)

    def _propose(self, context: DraftContext, query: int, asked: int, found: LookupResult) -> Draft:
        builder = TreeBuilder(context.capacity)
        builder.reset(int(context.index.tokens[-1]))
        builder.size, retrieved = _dual_query(
            *context.index.state,
            context.guesses,
            self.chain_length(context.capacity),
            context.max_depth,
            *builder.arrays,
            found.matched[query : query + 1 + asked],
            found.totals[query : query + 1 + asked],
            found.offsets[query : query + 2 + asked],
            found.tokens,
            found.parents,
            found.counts,
        )
        return Draft(builder.build(), retrieved)

    def chain_length(self, capacity: int) -> int:
        """Tokens of query 1's continuation: the published number, three quarters of a tree too small for it."""
        return min(SPAN, max(1, 3 * (capacity - 1) // 4))


@njit(cache=True, nogil=True)
def tokens_by_rank(rank: int) -> int:
    """Most draft tokens on the path through the guess of this rank (x(i+1) has rank 0), the guess included."""
    if rank <= 8:
        return 4
    return 3 if rank <= 32 else 1


_EXTENDED_RANKS = 32  # guesses of a lower rank are drafted alone


@njit(cache=True, nogil=True)
def _dual_query(
    tokens: NDArray[np.int32],
    length: int,
    tables: NDArray[np.int32],
    previous: NDArray[np.int32],
    guesses: NDArray[np.int32],
    chain_length: int,
    max_depth: int,
    tree_tokens: NDArray[np.int32],
    tree_parents: NDArray[np.int32],
    tree_depths: NDArray[np.int32],
    tree_sources: NDArray[np.int8],
    corpus_matched: NDArray[np.int8],
    corpus_totals: NDArray[np.int32],
    corpus_offsets: NDArray[np.int32],
    corpus_tokens: NDArray[np.int32],
    corpus_parents: NDArray[np.int32],
    corpus_counts: NDArray[np.int32],
) -> tuple[int, bool]:
    """Fill a tree (buffers as in ``TreeBuilder``, root set) by both queries; returns its size and if any succeeded.

    The corpus' answers are to query 1 (index 0) and to query 2 of the first guesses (1..).
    """
    size, capacity = 1, len(tree_tokens)
    retrieved = False
    if capacity == 1 or max_depth == 0:
        return size, retrieved
    tree = (tree_tokens, tree_parents, tree_depths, tree_sources)
    p, n = latest_full(tokens, length, tables, previous, tokens[max(0, length - 3) : length], SPAN)
    chain = tokens[p : min(length, p + min(chain_length, max_depth))] if n > 0 else tokens[:0]
    nodes = slice(corpus_offsets[0], corpus_offsets[1])
    corpus_first = corpus_matched[0] > n
    retrieved = n > 0 or corpus_matched[0] > 0
    if not corpus_first:
        size = add_path(*tree, size, chain, CONTEXT)
    share = size + (chain_length + 1) // 2 if corpus_first else size + chain_length // 4
    if corpus_matched[0] > 0:
        limited = (tree_tokens[:share], tree_parents[:share], tree_depths[:share], tree_sources[:share])
        trie_tokens = corpus_tokens[nodes]
        trie_sources = np.full(len(trie_tokens), CORPUS, np.int8)
        size = add_trie(*limited, size, trie_tokens, corpus_parents[nodes], trie_sources, max_depth)
    if corpus_first:
        size = add_path(*tree, size, chain, CONTEXT)
    key = np.empty(min(length, 2) + 1, np.int32)
    key[:-1] = tokens[length - len(key) + 1 : length]
    path = np.empty(tokens_by_rank(1), np.int32)
    for i in range(len(guesses)):
        if size == capacity:
            break
        key[-1] = path[0] = guesses[i]
        room = min(tokens_by_rank(i + 1), max_depth)
        drafted = 1
        p, n = latest_full(tokens, length, tables, previous, key, SPAN)
        query = i + 1
        if query < len(corpus_matched) and corpus_matched[query] > n:
            retrieved = True
            nodes = slice(corpus_offsets[query], corpus_offsets[query + 1])
            least = SURE * corpus_totals[query]
            drafted += _sure_path(
                corpus_tokens[nodes], corpus_parents[nodes], corpus_counts[nodes], least, path[1:room]
            )
        if drafted == 1 and n > 0:
            retrieved = True
            drafted = min(room, 1 + length - p)
            path[1:drafted] = tokens[p : p + drafted - 1]
        size = add_path(*tree, size, path[:drafted], NEXT_NEXT)
    return size, retrieved


@njit(cache=True, nogil=True)
def _sure_path(
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
    counts: NDArray[np.int32],
    least: float,
    path: NDArray[np.int32],
) -> int:
    """Follow the most frequent child from the root of a trie into ``path`` while it was seen ``least`` times or more;
    returns how far that is.
    """
    node, length = -1, 0
    for child in range(len(tokens)):  # counts fall, so a node's first child is its most frequent one
        if length == len(path) or counts[child] < least:
            break
        if parents[child] == node:
            path[length] = tokens[child]
            node, length = child, length + 1
    return length
