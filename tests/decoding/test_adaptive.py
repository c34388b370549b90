"""Adaptive drafting: what grows, in which order, and what is learnt from verification."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.decoding import evidence as ev
from cluster.decoding.adaptive import Adaptive
from cluster.decoding.calibration import Calibration
from cluster.decoding.candidates import Predicted
from cluster.decoding.drafting import Draft, DraftContext, Grown, Verified
from cluster.decoding.ngram_index import NgramIndex
from cluster.decoding.ranking import Ranked
from cluster.decoding.tree import SOURCES

VOCABULARY = 50
TEXTS = st.lists(st.integers(0, 5), min_size=1, max_size=60)


def context(
    text: list[int], capacity: int = 16, guesses: list[int] | None = None, max_depth: int = 99, predicted=None
) -> DraftContext:
    ids = np.array(guesses or [], np.int32)
    gaps = np.arange(len(ids), dtype=np.float32)
    return DraftContext(NgramIndex(np.array(text, np.int32)), capacity, max_depth, ids, gaps, predicted)


def grown_of(draft: Draft) -> Grown:
    assert draft.grown is not None
    return draft.grown


def verified(draft: Draft, emitted: list[int], before: int = -1, ranks: dict[int, list[int]] | None = None) -> Verified:
    """What the engine reports of a target that emits these tokens, as far as the draft goes along."""
    nodes = [0]
    for token in emitted[:-1]:
        children = np.flatnonzero((draft.tree.parents == nodes[-1]) & (draft.tree.tokens == token))
        if not len(children):
            break
        nodes.append(int(children[0]))
    ids = np.full((len(draft.tree), ev.SUCCESSORS), -1, np.int32)
    for node, best in (ranks or {}).items():
        ids[node] = best
    gaps = np.tile(np.arange(ev.SUCCESSORS, dtype=np.float32), (len(ids), 1))
    kept = np.array(emitted[: len(nodes)], np.int32)
    return Verified(draft, before, np.array(nodes), kept, Ranked(ids, gaps))


@given(TEXTS, st.integers(1, 40), st.lists(st.integers(6, 40), unique=True, max_size=30), st.integers(0, 9))
def test_trees_are_tries_in_order_of_falling_path_probability(text, capacity, guesses, max_depth):
    (draft,) = Adaptive(VOCABULARY).propose([context(text, capacity, guesses, max_depth)])
    tree, grown = draft.tree, grown_of(draft)
    assert 1 <= len(tree) <= capacity and tree.depths.max() <= max_depth
    assert np.all(np.diff(grown.probabilities) <= 1e-6)
    edges = list(zip(tree.parents[1:].tolist(), tree.tokens[1:].tolist(), strict=True))
    assert len(set(edges)) == len(edges)
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        assert parent < node and tree.depths[node] == tree.depths[parent] + 1
        assert grown.probabilities[node] <= grown.probabilities[parent]
    for parent in range(len(tree)):
        assert grown.probabilities[tree.parents == parent].sum() <= grown.probabilities[parent] * 1.001


def test_every_source_is_heard():
    drafter = Adaptive(VOCABULARY)
    first = drafter.propose([context([30, 31])])[0]
    best = [40, 41, 42, 43, 44, 45, 46, 47]
    drafter.observe([verified(first, [9], before=30, ranks={0: best})])  # behind (30, 31)
    predicted = Predicted(np.array([20, 21, 22], np.int32), 1, 5, 0.9)
    (draft,) = drafter.propose([context([1, 2, 3, 31, 7, 8, 31], 60, [10, 11], predicted=predicted)])
    found = {int(t): SOURCES[s] for t, s in zip(draft.tree.tokens, draft.tree.sources, strict=True)}
    assert (found[7], found[10], found[40], found[21]) == ("context", "next_next", "successor", "prediction")
    assert draft.retrieved


def test_a_prediction_is_followed_as_far_as_it_is_likely():
    predicted = Predicted(np.arange(20, 40, dtype=np.int32), 3, 16, 0.9)
    (draft,) = Adaptive(VOCABULARY).propose([context([1, 2], 12, predicted=predicted)])
    path = draft.tree.tokens[draft.tree.sources == SOURCES.index("prediction")].tolist()
    assert path == list(range(23, 23 + len(path))) and len(path) > 5


def test_the_longer_a_prediction_holds_the_more_of_it_is_drafted():
    expected = np.arange(20, 49, dtype=np.int32)
    costs = 8.0 + np.arange(30.0)
    lengths = []
    for share in (0.3, 0.8, 0.97, 0.999):
        predicted = Predicted(expected, 0, 20, share)
        (draft,) = Adaptive(VOCABULARY).propose([context([1, 2], 30, predicted=predicted)], costs)
        lengths.append(len(draft.tree))
    assert lengths == sorted(set(lengths)) and lengths[0] <= 2 and lengths[-1] >= 25


def test_other_sources_do_not_make_a_prediction_unlikely():
    text = [5, 10, 5, 11, 5, 12, 5, 13, 5]  # everything followed 5, but not what is predicted
    predicted = Predicted(np.array([14, 15], np.int32), 0, 20, 0.95)
    grown = grown_of(Adaptive(VOCABULARY).propose([context(text, 16, predicted=predicted)])[0])
    below_root = {
        int(t): p
        for t, p, parent in zip(grown.tree.tokens, grown.probabilities, grown.tree.parents, strict=True)
        if parent == 0
    }
    assert below_root[14] > 0.9 and sum(below_root.values()) <= 1.001


def test_costs_decide_how_much_is_drafted():
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    drafter = Adaptive(VOCABULARY)
    (free,) = drafter.propose([context(text, 16)], np.ones(16))
    (dear,) = drafter.propose([context(text, 16)], 1.0 + 5 * np.arange(16.0))
    assert len(free.tree) > 4 and len(dear.tree) == 1


def test_hot_requests_start_from_lower_odds():
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    likely = []
    for temperature in (0.0, 0.7, 1.2):
        heated = replace(context(text), heat=ev.heat_of(temperature))
        likely.append(grown_of(Adaptive(VOCABULARY).propose([heated])[0]).probabilities[1])
    assert likely[0] == likely[1] > likely[2]


def test_repeated_failure_makes_a_source_less_believed_and_success_more():
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    likely = []
    for outcome in ([4, 5], [9]):
        calibration = Calibration()
        drafter = Adaptive(VOCABULARY, None, calibration)
        for _ in range(300):
            (draft,) = drafter.propose([context(text)])
            drafter.observe([verified(draft, outcome)])
        (draft,) = drafter.propose([context(text)])
        likely.append(grown_of(draft).probabilities[draft.tree.tokens.tolist().index(4)])
    prior = grown_of(Adaptive(VOCABULARY).propose([context(text)])[0])
    assert likely[0] > prior.probabilities[prior.tree.tokens.tolist().index(4)] > likely[1]


@given(st.lists(st.booleans(), min_size=50, max_size=400))
def test_weights_stay_near_their_priors(outcomes):
    calibration = Calibration()
    priors = calibration.weights.copy()
    proofs = np.tile(ev.ABSENT, (2, 1))
    proofs[1, ev.CONTEXT] += 5
    tokens, parents = np.array([1, 2], np.int32), np.array([-1, 0], np.int32)
    for outcome in outcomes:
        calibration.observe(tokens, parents, proofs, np.array([0]), np.array([2 if outcome else 3], np.int32))
    assert np.isfinite(calibration.weights).all()
    untouched = np.setdiff1d(np.arange(ev.WEIGHTS), proofs[1])
    assert np.array_equal(calibration.weights[untouched], priors[untouched])


@pytest.mark.parametrize("repeats", [1, 50])
def test_same_inputs_give_the_same_drafts(repeats):
    drafts = []
    for _ in range(2):
        drafter = Adaptive(VOCABULARY)
        for _ in range(repeats):
            (draft,) = drafter.propose([context([1, 2, 1, 2, 1], 8, [3, 4])])
            drafter.observe([verified(draft, [2, 1, 2])])
        drafts.append(grown_of(drafter.propose([context([1, 2, 1, 2, 1], 8, [3, 4])])[0]))
    assert np.array_equal(drafts[0].probabilities, drafts[1].probabilities)
