from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.decoding.drafting import DraftContext
from cluster.decoding.logitspec import LogitSpec, tokens_by_rank
from cluster.decoding.methods import make_drafter
from cluster.decoding.ngram_index import NgramIndex
from cluster.decoding.tree import CONTEXT, NEXT_NEXT
from tests.tiny import METHODS_ALONE


def context(text: list[int], capacity: int, guesses: list[int] = (), max_depth: int = 99) -> DraftContext:  # type: ignore[assignment]
    gaps = np.arange(len(guesses), dtype=np.float32)
    return DraftContext(NgramIndex(np.array(text, np.int32)), capacity, max_depth, np.array(guesses, np.int32), gaps)


def children(tree, node: int = 0) -> list[int]:
    return tree.tokens[1:][tree.parents[1:] == node].tolist()


def paths(tree) -> set[tuple[int, ...]]:
    lines: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        lines.append((*lines[tree.parents[node]], int(tree.tokens[node])))
    return set(lines[1:])


@pytest.mark.parametrize("method", METHODS_ALONE)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=50), st.integers(1, 40), st.integers(0, 12))
def test_trees_keep_their_bounds(method, text, capacity, max_depth):
    drafter = make_drafter(method, 100)
    guesses = [t for t in range(30) if t != text[-1]][: drafter.guesses_wanted(capacity)]
    (draft,) = drafter.propose([context(text, capacity, guesses, max_depth)])
    assert 1 <= len(draft.tree) <= capacity
    assert draft.tree.tokens[0] == text[-1]
    assert draft.tree.depths.max() <= max_depth


def test_prompt_lookup_continues_the_latest_occurrence_of_the_longest_suffix():
    text = [1, 2, 3, 50, 51, 52, 9, 2, 3, 60, 61, 9, 1, 2, 3]
    (draft,) = make_drafter("pld", 100).propose([context(text, 4)])
    assert draft.tree.tokens.tolist() == [3, 50, 51, 52]
    assert draft.retrieved and draft.tree.is_chain


def test_prompt_lookup_without_a_match_is_a_vanilla_step():
    (draft,) = make_drafter("pld", 100).propose([context([1, 2, 3], 10)])
    assert len(draft.tree) == 1 and not draft.retrieved


def test_logitspec_asks_both_queries():
    #        query 1: what followed (7, 8)      query 2: what followed (8, 5)
    text = [7, 8, 20, 21, 22, 23, 0, 0, 0, 8, 5, 30, 31, 32, 33, 0, 0, 0, 7, 8]
    (draft,) = LogitSpec().propose([context(text, 64, [5, 6])])
    assert children(draft.tree) == [20, 5, 6]
    chain = paths(draft.tree)
    assert (20, 21, 22, 23) in chain
    assert (5, 30, 31, 32) in chain and (5, 30, 31, 32, 33) not in chain  # rank 1: 4 tokens in all
    assert (6,) in chain and not any(p[:1] == (6,) and len(p) > 1 for p in chain)  # never seen: the guess alone
    assert set(draft.tree.sources[1:].tolist()) == {CONTEXT, NEXT_NEXT}


def test_guesses_alone_are_drafts_but_no_retrieval():
    (draft,) = LogitSpec().propose([context([1, 2, 3], 8, [4, 5, 6])])
    assert children(draft.tree) == [4, 5, 6]
    assert not draft.retrieved


def test_published_cut_by_rank():
    assert [tokens_by_rank(r) for r in (1, 8, 9, 32, 33, 63)] == [4, 4, 3, 3, 1, 1]


def test_every_capacity_works_and_more_capacity_never_drops_the_first_guess():
    text = list(range(10, 40)) * 3
    for capacity in range(2, 65):
        (draft,) = LogitSpec().propose([context(text, capacity, list(range(100, 163)))])
        assert len(draft.tree) == capacity
        assert capacity < 3 or {10, 100} <= set(children(draft.tree))
