"""The size of tree that brings most tokens a second."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.decoding.fitting import Fitting

FLAT = np.ones(64)
STEEP = np.arange(1.0, 65.0)


def test_wide_trees_where_they_cost_nothing():
    assert Fitting().choose(FLAT) == 64
    assert Fitting().choose(FLAT[:8]) == 8


def test_no_tree_where_each_token_costs_a_step():
    fitting = Fitting()
    assert fitting.capacity == 1
    assert fitting.choose(STEEP) == 1


def test_no_wider_than_the_steps_that_cost_no_more():
    costs = np.r_[np.ones(16), np.full(48, 2.0)]
    assert Fitting().choose(costs) == 16


@given(st.lists(st.floats(1.0, 10.0), min_size=1, max_size=64), st.lists(st.integers(0, 8), max_size=50))
@settings(deadline=None)
def test_it_is_the_largest_size_of_those_offered_for_its_time(costs, accepted):
    costs = np.sort(np.array(costs))
    fitting = Fitting()
    fitting.choose(costs)
    for n in accepted:
        fitting.observe(n)
    chosen = fitting.choose(costs)
    assert 1 <= chosen <= len(costs)
    assert chosen == 1 or np.all(costs[chosen:] > costs[chosen - 1])  # a larger one for the same time brings more


@pytest.mark.parametrize(("accepted", "wider"), [(0, False), (3, True)])
def test_it_follows_what_trees_bring(accepted, wider):
    costs = 1 + 0.08 * np.arange(64.0)
    fitting = Fitting()
    before = fitting.choose(costs)
    for _ in range(100):
        fitting.observe(accepted)
    assert (fitting.choose(costs) > before) is wider
    assert (fitting.choose(costs) < before) is not wider


def test_trees_that_did_not_pay_are_tried_again_later():
    costs = 1 + 0.08 * np.arange(64.0)
    fitting = Fitting()
    steps = []
    for _ in range(2000):
        steps.append(fitting.choose(costs) > 1)
        fitting.observe(0)
    assert 0 < sum(steps) < 500
    assert any(steps[1000:])
