"""What the draft sources propose as the next token behind a path: candidates with their evidence.

Each function adds the proposals of one source. A token that several sources name is one candidate with the evidence of
all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cluster.decoding import evidence as ev
from cluster.decoding.ngram_index import slot_of
from cluster.decoding.successors import SuccessorArrays, pair_slot

ROOM = 128  # most candidates behind one path
_VISITS = 10  # occurrences of an n-gram that are looked at, for each n


class Candidates(NamedTuple):
    """Buffers of ``ROOM`` candidates.

    Attributes:
        tokens: int32 [ROOM].
        proofs: int16 [ROOM, COLUMNS], buckets of evidence.
        places: int32 [ROOM, 3], where the sources go on behind the candidate: the corpus query and the node of its
            trie, the index of the predicted output; -1 is nowhere.
    """

    tokens: NDArray[np.int32]
    proofs: NDArray[np.int16]
    places: NDArray[np.int32]


class CorpusAnswers(NamedTuple):
    """Answers to the queries of one sequence: fields of ``LookupResult``, but `offsets` [Q + 1] into all nodes."""

    matched: NDArray[np.int8]
    totals: NDArray[np.int32]
    offsets: NDArray[np.int32]
    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    counts: NDArray[np.int32]


class Predicted(NamedTuple):
    """An expected output.

    Attributes:
        tokens: int32 [L], maybe none.
        at: index of the next one, as far as the answer has come.
        run: tokens in a row that just came true.
        share: of its tokens that come true, of late.
    """

    tokens: NDArray[np.int32]
    at: int
    run: int
    share: float


@njit(cache=True, nogil=True)
def _find(token: int, candidates: Candidates, count: int) -> tuple[int, int]:
    """Index of a token among the candidates, which it joins if it is new (-1: no room), and their number."""
    for c in range(count):
        if candidates.tokens[c] == token:
            return c, count
    if count == ROOM:
        return -1, count
    candidates.tokens[count] = token
    for column in range(ev.COLUMNS):
        candidates.proofs[count, column] = ev.OFFSETS[column]
    candidates.places[count] = -1
    return count, count + 1


@njit(cache=True, nogil=True)
def add_context(
    path: NDArray[np.int32],
    tokens: NDArray[np.int32],
    tables: NDArray[np.int32],
    previous: NDArray[np.int32],
    candidates: Candidates,
) -> int:
    """Tokens that followed earlier occurrences of the path's end; the first source. Returns how many."""
    matches = np.empty(3 * _VISITS, np.int32)
    supports = np.empty(3 * _VISITS, np.int32)
    count, size = 0, len(path)
    for n in range(min(len(tables), size), 0, -1):
        p = tables[n - 1][slot_of(tokens, path[size - n :], tables[n - 1])]
        for _ in range(_VISITS):
            if p < 0:
                break
            matched = n
            while matched < size and p > matched and tokens[p - 1 - matched] == path[size - 1 - matched]:
                matched += 1
            if matched == n or n == len(tables):  # else it was seen with a longer n-gram
                c, count = _find(tokens[p], candidates, count)
                if candidates.proofs[c, ev.CONTEXT] == ev.OFFSETS[ev.CONTEXT]:  # new
                    candidates.proofs[c, ev.CONTEXT] += 1
                    matches[c], supports[c] = 0, 0
                matches[c] = max(matches[c], matched)
                supports[c] += 1
            p = previous[n - 1, p]
    for c in range(count):
        order, contested = 0, False
        for other in range(count):
            if other != c and matches[other] >= matches[c]:
                contested = True
                order += matches[other] > matches[c] or other < c
        candidates.proofs[c, ev.CONTEXT] = ev.context_bucket(matches[c], order, supports[c], contested)
    return count


@njit(cache=True, nogil=True)
def add_guesses(guesses: NDArray[np.int32], gaps: NDArray[np.float32], candidates: Candidates, count: int) -> int:
    """Next-next guesses, at the root only. Returns the number of candidates, as the functions below do."""
    for k in range(len(guesses)):
        c, count = _find(guesses[k], candidates, count)
        if c >= 0:
            candidates.proofs[c, ev.GUESS] = ev.guess_bucket(k + 1, ev.gap_class(gaps[k]))
    return count


@njit(cache=True, nogil=True)
def add_successors(path: NDArray[np.int32], successors: SuccessorArrays, candidates: Candidates, count: int) -> int:
    """What the target ranked earlier after the path's last token, and after its last two."""
    token = path[-1]
    for k in range(ev.SUCCESSORS):
        if successors.ids[token, k] < 0:
            break
        c, count = _find(successors.ids[token, k], candidates, count)
        if c >= 0:
            candidates.proofs[c, ev.SUCCESSOR] = ev.successor_bucket(k, successors.gaps[token, k])
    if len(path) < 2:
        return count
    slot = pair_slot(path[-2], token)
    if successors.pairs[slot, 0] == path[-2] and successors.pairs[slot, 1] == token:
        for k in range(ev.SUCCESSORS):
            c, count = _find(successors.pair_ids[slot, k], candidates, count)
            if c >= 0:
                candidates.proofs[c, ev.PAIR] = ev.pair_bucket(k, successors.pair_gaps[slot, k])
    return count


@njit(cache=True, nogil=True)
def add_corpus(
    corpus: CorpusAnswers,
    guesses: NDArray[np.int32],
    token: int,
    depth: int,
    place: NDArray[np.int32],
    candidates: Candidates,
    count: int,
) -> int:
    """What the corpus has behind a node of the draft tree.

    Its place in query 1's trie leads on; a child of the root that is a guess has a trie of its own (query 2), which is
    taken if its n-gram is longer than what query 1 knows of the path.
    """
    if len(corpus.matched) == 0:
        return count
    query, inside = place[0], place[1]
    if depth == 0:
        query, inside = 0, -1
    elif depth == 1:
        own = _query_of(token, guesses, len(corpus.matched))
        if own > 0 and corpus.matched[own] > (corpus.matched[query] + 1 if query >= 0 else 0):
            query, inside = own, -1
    if query < 0 or corpus.matched[query] == 0:
        return count
    first = corpus.offsets[query]
    total = corpus.totals[query] if inside < 0 else corpus.counts[first + inside]
    known = corpus.matched[query] + depth - (1 if query > 0 else 0)
    for i in range(first, corpus.offsets[query + 1]):
        if corpus.parents[i] == inside:
            c, count = _find(corpus.tokens[i], candidates, count)
            if c >= 0:
                candidates.proofs[c, ev.CORPUS] = ev.corpus_bucket(known, corpus.counts[i], total)
                candidates.places[c, 0], candidates.places[c, 1] = query, i - first
    return count


@njit(cache=True, nogil=True)
def _query_of(token: int, guesses: NDArray[np.int32], queries: int) -> int:
    """Number of the query 2 that a guess was asked with, or -1."""
    for k in range(min(len(guesses), queries - 1)):
        if guesses[k] == token:
            return k + 1
    return -1


@njit(cache=True, nogil=True)
def add_prediction(prediction: Predicted, depth: int, at: int, candidates: Candidates, count: int) -> int:
    """The next token of the predicted output."""
    if 0 <= at < len(prediction.tokens):
        c, count = _find(prediction.tokens[at], candidates, count)
        if c >= 0:
            candidates.proofs[c, ev.PREDICTION] = ev.prediction_bucket(prediction.run + depth)
            candidates.places[c, 2] = at + 1
    return count
