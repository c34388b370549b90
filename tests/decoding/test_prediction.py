"""Following an answer through its prediction."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cluster.decoding.prediction import Prediction


def steps_needed(prediction: list[int], answer: list[int], limit: int = 16) -> int:
    """Decode steps until the answer is out, drafting from the prediction alone."""
    source = Prediction(np.array(prediction, np.int32))
    out = answer[:1]
    steps = 0
    while len(out) < len(answer):
        best = 0
        for path in source.paths(np.array(out, np.int32), limit):
            ahead = answer[len(out) :]
            hits = next((i for i, (a, b) in enumerate(zip(path, ahead, strict=False)) if a != b), len(path))
            best = max(best, min(hits, len(ahead)))
        out += answer[len(out) : len(out) + best + 1]
        steps += 1
    return steps


def test_a_prediction_that_comes_true_needs_one_step_per_limit():
    text = list(range(100))
    assert steps_needed(text, text, limit=24) == 4


def test_a_replaced_token_costs_one_step():
    text = list(range(60))
    changed = [*text[:30], 777, *text[31:]]
    assert steps_needed(text, changed, limit=60) == 2


def test_insertions_and_deletions_are_found_again():
    text = list(range(60))
    assert steps_needed(text, [*text[:20], 900, 901, *text[20:]], limit=60) <= 5
    assert steps_needed(text, [*text[:20], *text[30:]], limit=60) <= 3


def test_a_repeated_line_does_not_send_it_astray():
    text = [*range(10), 5, 6, *range(20, 40)]
    assert steps_needed(text, text, limit=50) == 1


def test_how_much_comes_true_is_followed():
    text = np.arange(100, dtype=np.int32)
    kept, changed = Prediction(text), Prediction(text)
    other = text + 100
    shares = [(kept.place(text[:n]).share, changed.place(other[:n]).share) for n in range(0, 101, 25)]
    assert shares[0][0] == shares[0][1]
    assert all(a[0] < b[0] < 1.0 and a[1] > b[1] > 0.0 for a, b in pairwise(shares))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_any_answer_gets_drafts_of_the_prediction_within_the_limit(prediction, answer):
    source = Prediction(np.array(prediction, np.int32))
    text = ",".join(map(str, prediction)) + ","
    for at in range(1, len(answer) + 1):
        paths = source.paths(np.array(answer[:at], np.int32), 6)
        assert sum(map(len, paths)) <= 6
        assert all("".join(f"{t}," for t in path) in text for path in paths)
