"""Drafting with a corpus: which source is believed, and that trees stay within their bounds."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.decoding.drafting import DraftContext
from cluster.decoding.logitspec import LogitSpec
from cluster.decoding.lookup_methods import Rest
from cluster.decoding.methods import MissingCorpus, make_drafter
from cluster.decoding.ngram_index import NgramIndex
from cluster.decoding.tree import CONTEXT, CORPUS
from cluster.retrieval.lookup import Finished, LookupResult

DEPTH = 6


class TextCorpus:
    """Answers from a text by scanning it: slow, and plainly right."""

    sizes = (1, 2, 3, 4)

    def __init__(self, text: list[int]) -> None:
        self.text = text
        self.calls = 0

    def lookup(self, queries, lengths, max_nodes) -> LookupResult:
        self.calls += 1
        most = np.broadcast_to(max_nodes, len(queries))
        answers = [self._one(q[len(q) - n :].tolist(), m) for q, n, m in zip(queries, lengths, most, strict=True)]
        offsets = np.concatenate(([0], np.cumsum([len(a[2]) for a in answers]))).astype(np.int32)
        flat = [np.array([x for a in answers for x in a[i]], np.int32) for i in (2, 3, 4)]
        matched, totals = (np.array([a[i] for a in answers]) for i in (0, 1))
        return LookupResult(matched.astype(np.int8), totals.astype(np.int32), offsets, *flat)

    def submit(self, queries, lengths, max_nodes) -> Finished:
        return Finished(self.lookup(queries, lengths, max_nodes))

    def _one(self, query: list[int], most: int):
        for n in range(min(len(query), 4), 0, -1):
            found = [p for p in range(n, len(self.text)) if self.text[p - n : p] == query[-n:]]
            if found:
                ends = ((p, end) for p in found for end in range(p + 1, min(p + DEPTH, len(self.text)) + 1))
                counts = Counter(tuple(self.text[p:end]) for p, end in ends)
                order = sorted(counts, key=lambda path: (-counts[path], len(path), path))[:most]
                place = {path: i for i, path in enumerate(order)} | {(): -1}
                parents = [place[path[:-1]] for path in order]
                return n, len(found), [path[-1] for path in order], parents, [counts[path] for path in order]
        return 0, 0, [], [], []


def context(text: list[int], capacity: int, guesses: list[int], max_depth: int = 99) -> DraftContext:
    gaps = np.arange(len(guesses), dtype=np.float32)
    return DraftContext(NgramIndex(np.array(text, np.int32)), capacity, max_depth, np.array(guesses, np.int32), gaps)


def counting() -> tuple[TextCorpus, list[DraftContext]]:
    """A corpus that counts on, and five sequences at different places of it."""
    contexts = [context([i, i + 1], 16, [i + 2, i + 3, 40 + i]) for i in range(5)]
    return TextCorpus(list(range(30)) * 2), contexts


def paths(tree) -> set[tuple[int, ...]]:
    lines: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        lines.append((*lines[tree.parents[node]], int(tree.tokens[node])))
    return set(lines[1:])


def test_rest_is_the_corpus_tree_by_frequency():
    corpus = TextCorpus([1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2, 9])
    (draft,) = Rest(corpus).propose([context([8, 1, 2], 4, [])])
    assert paths(draft.tree) == {(3,), (9,), (3, 4)}
    assert set(draft.tree.sources[1:].tolist()) == {CORPUS}
    assert draft.retrieved


def test_rest_without_a_match_is_a_vanilla_step():
    (draft,) = Rest(TextCorpus([1, 2, 3])).propose([context([7], 8, [])])
    assert len(draft.tree) == 1 and not draft.retrieved


def test_the_longer_match_extends_a_guess():
    corpus = TextCorpus([6, 7, 5, 40, 41, 42, 0])  # knows (6, 7, 5), the context only (5)
    text = [5, 30, 31, 32, 0, 6, 7]
    (draft,) = LogitSpec(corpus).propose([context(text, 32, [5])])
    assert (5, 40, 41, 42) in paths(draft.tree)
    (without,) = LogitSpec().propose([context(text, 32, [5])])
    assert (5, 30, 31, 32) in paths(without.tree)


def test_a_corpus_that_is_not_sure_leaves_the_guess_to_the_context():
    other = [6, 7, 9, 10, 11, 12, 13, 14, 0] * 20  # takes all the room of query 1
    corpus = TextCorpus(other + [6, 7, 5, 40, 41, 42, 0] * 4 + [6, 7, 5, 40, 43, 44, 0] + [6, 7, 5, 50, 51, 52, 0])
    text = [5, 30, 31, 32, 0, 6, 7]
    (draft,) = LogitSpec(corpus).propose([context(text, 16, [5])])
    assert {line for line in paths(draft.tree) if line[0] == 5} == {(5,), (5, 40)}
    corpus.text += [6, 7, 5, 50, 51, 52, 0]
    (draft,) = LogitSpec(corpus).propose([context(text, 16, [5])])
    assert (5, 30, 31, 32) in paths(draft.tree)


def test_the_context_is_believed_at_a_tie_and_both_answer_query_one():
    corpus = TextCorpus([1, 2, 3, 50, 51, 0])
    (draft,) = LogitSpec(corpus).propose([context([1, 2, 3, 60, 61, 0, 1, 2, 3], 32, [])])
    lines = paths(draft.tree)
    assert (60, 61) in lines and (50, 51) in lines
    assert draft.tree.tokens[1] == 60
    assert set(draft.tree.sources[1:].tolist()) == {CONTEXT, CORPUS}


def test_a_batch_costs_one_lookup_and_rows_do_not_mix():
    corpus, contexts = counting()
    together = LogitSpec(corpus).propose(contexts)
    assert corpus.calls == 1
    for draft, alone in zip(together, contexts, strict=True):
        (single,) = LogitSpec(corpus).propose([alone])
        assert draft.tree.tokens.tolist() == single.tree.tokens.tolist()


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=40),
    st.lists(st.integers(0, 4), max_size=40),
    st.integers(1, 30),
    st.integers(0, 9),
)
def test_trees_keep_their_bounds(text, stored, capacity, max_depth):
    for drafter in (LogitSpec(TextCorpus(stored)), Rest(TextCorpus(stored))):
        guesses = [t for t in range(20) if t != text[-1]][: drafter.guesses_wanted(capacity)]
        (draft,) = drafter.propose([context(text, capacity, guesses, max_depth)])
        assert 1 <= len(draft.tree) <= capacity
        assert draft.tree.depths.max() <= max_depth
        lines = paths(draft.tree)
        assert len(lines) == len(draft.tree) - 1  # no node twice


def test_rest_needs_a_corpus():
    with pytest.raises(MissingCorpus, match="--corpus"):
        make_drafter("rest", 100)


@pytest.mark.parametrize("method", ["rest", "logitspec", "adaptive"])
def test_what_was_asked_ahead_is_not_asked_again(method):
    corpus, contexts = counting()
    drafter = make_drafter(method, 64, corpus)
    drafter.ask(contexts)
    ahead = drafter.propose(contexts)
    assert corpus.calls == 1
    afresh = make_drafter(method, 64, corpus).propose(contexts)
    assert [paths(d.tree) for d in ahead] == [paths(d.tree) for d in afresh]


@pytest.mark.parametrize("method", ["rest", "logitspec", "adaptive"])
def test_another_batch_than_was_asked_for_gets_its_own_answers(method):
    corpus, contexts = counting()
    drafter = make_drafter(method, 64, corpus)
    drafter.ask(contexts)
    fewer = drafter.propose(contexts[1:3])
    afresh = make_drafter(method, 64, corpus).propose(contexts[1:3])
    assert [paths(d.tree) for d in fewer] == [paths(d.tree) for d in afresh]
