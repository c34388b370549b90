from __future__ import annotations

import pytest

from eval_jobs.comparison import divergence, summarize
from eval_jobs.systems import Generation


def generation(tokens: list[int], seconds: float, steps: int, **more) -> Generation:
    return Generation(tokens, seconds, steps, **more)


def no_gap(*_) -> float:
    raise AssertionError("nothing diverges here")


def test_figures_by_system():
    runs = {
        "hf": [generation([1, 2, 3, 4], 4.0, 3), generation([1, 2], 1.0, 1)],
        "vanilla": [generation([1, 2, 3, 4], 2.0, 3), generation([1, 2], 1.0, 1)],
        "pld": [
            generation([1, 2, 3, 4], 1.0, 1, retrieved_steps=1, part_seconds={"draft": 0.25, "forward": 0.75}),
            generation([1, 2], 0.5, 1, part_seconds={"draft": 0.05, "forward": 0.45}),
        ],
    }
    methods = summarize(runs, no_gap)
    pld = methods["pld"]
    assert pld["tokens"] == 6 and pld["seconds"] == 1.5 and pld["tokens_per_s"] == 4.0
    assert pld["mat"] == 2.0  # four tokens after the two first ones, in two steps
    assert methods["vanilla"]["mat"] == 1.0
    assert pld["speedup_vs_hf"] == 3.0  # median of 4 and 2
    assert pld["speedup_vs_vanilla"] == 2.0
    assert pld["identical_to_hf"] == pld["identical_to_vanilla"] == 2
    assert pld["worst_divergence_gap"] == 0.0
    assert pld["retrieval_success"] == 0.5
    assert pld["time_share"] == {"draft": pytest.approx(0.2), "forward": pytest.approx(0.8)}
    assert methods["hf"]["time_share"] is None


def test_the_gap_is_measured_where_outputs_part():
    asked = []

    def gap(prompt, common, one, other):
        asked.append((prompt, list(common), one, other))
        return 0.125

    runs = {
        "vanilla": [generation([1, 2, 3], 1.0, 2), generation([5, 6], 1.0, 1)],
        "logitspec": [generation([1, 2, 3], 1.0, 2), generation([5, 7, 8], 1.0, 1)],
    }
    methods = summarize(runs, gap)
    assert asked == [(1, [5], 7, 6)]
    assert methods["logitspec"]["worst_divergence_gap"] == 0.125
    assert methods["logitspec"]["identical_to_vanilla"] == 1
    assert methods["logitspec"]["speedup_vs_hf"] is None


def test_divergence():
    assert divergence([1, 2], [1, 2, 3]) is None
    assert divergence([1, 9, 3], [1, 2, 3]) == 1
