"""Figures are what a hand calculation says."""

from __future__ import annotations

import pytest

from eval_jobs.metrics.acceptance import (
    by_depth,
    by_rank,
    by_source,
    mean_accepted_tokens,
    next_next_hit_rate,
    retrieval_success,
    steps_reaching,
    time_share,
)
from eval_jobs.metrics.accuracy import score
from eval_jobs.metrics.exactness import exactness
from eval_jobs.metrics.pairs import compared
from eval_jobs.metrics.speed import inter_token_latency, speedup, step_latency, time_to_first_token, tokens_per_second
from eval_jobs.rows import Divergence, Trace
from tests.eval_jobs.runs import known, row, task


def test_speedup_is_the_median_over_repeats_of_the_ratio_of_means():
    base = [row(question=q, repeat=r, seconds=2.0) for q in "12" for r in range(3)]  # 2 tokens/s
    times = {0: (1.0, 1.0), 1: (0.5, 1.0), 2: (1.0, 2.0)}  # means of 4, 6 and 3 tokens/s
    mine = [row("pld", q, times[r][i], repeat=r) for i, q in enumerate("12") for r in range(3)]
    found = known(speedup(mine, base))
    assert (found.median, found.lowest, found.highest, found.questions) == (2.0, 1.5, 3.0, 2)
    assert 1.0 <= found.low <= found.median <= found.high <= 4.0
    itself = known(speedup(base, base))
    assert itself.low == itself.high == 1.0


def test_questions_that_one_of_both_lacks_are_left_out_of_the_speedup():
    base = [row(question="1", seconds=2.0), row(question="2", seconds=2.0, error="no")]
    mine = [row("pld", "1", 1.0), row("pld", "2", 0.1), row("pld", "3", 0.1)]
    found = known(speedup(mine, base))
    assert (found.median, found.questions) == (2.0, 1)
    assert speedup(mine, []) is None


def test_turns_of_a_conversation_count_together():
    base = [row(turn=0, seconds=1.0), row(turn=1, seconds=3.0)]
    mine = [row("pld", turn=0, seconds=1.0), row("pld", turn=1, seconds=1.0)]
    assert known(speedup(mine, base)).median == 2.0
    assert tokens_per_second(base) == 2.0


def test_latencies():
    rows = [row(chunks=[1, 3], seconds=2.0)]  # the first token after 1 s, the three others together after 2 s
    assert time_to_first_token(rows) == {"p50": 1.0, "p90": 1.0, "p99": 1.0}
    assert known(step_latency(rows))["p50"] == 1.0
    assert known(inter_token_latency(rows))["p50"] == 0.0
    assert time_to_first_token([row(chunks=[], decode_steps=0)]) is None


def test_acceptance():
    rows = [
        row(
            chunks=[1, 3, 1],
            drafted={"context": 4, "next_next": 2},
            accepted={"context": 2},
            drafted_depths=[4, 2],
            accepted_depths=[1, 1],
            drafted_ranks=[2, 1],
            accepted_ranks=[1],
            retrieved_steps=1,
            part_seconds={"draft": 1.0, "forward": 3.0},
        ),
        row(chunks=[1, 1, 1], drafted_depths=[1], drafted={"context": 1}, part_seconds={"forward": 4.0}),
    ]
    assert mean_accepted_tokens(rows) == 6 / 4
    assert by_source(rows) == {"context": (2, 5), "next_next": (0, 2)}
    assert by_depth(rows) == [(1, 5), (1, 2)]
    assert by_rank(rows) == [(1, 2), (0, 1)]
    assert steps_reaching(rows) == [0.25, 0.25]
    assert sum(steps_reaching(rows)) == known(mean_accepted_tokens(rows)) - 1
    assert retrieval_success(rows) == 0.25
    assert time_share(rows) == {"draft": 0.125, "forward": 0.875}


def test_next_next_hit_rate():
    traces = [Trace("b", "1", 0, "qa", [], [], [1, 2, 60]), Trace("b", "2", 0, "qa", [], [], [0])]
    rates = next_next_hit_rate(traces)
    assert len(rates) == 60
    assert (rates[0], rates[1], rates[58], rates[59]) == (0.25, 0.5, 0.5, 0.75)
    assert next_next_hit_rate([]) == []


def test_exactness_tells_ties_from_errors():
    base = row()
    same, tie, wrong, longer, unseen = (row(m) for m in ("a", "b", "c", "d", "e"))
    for r in (tie, wrong, unseen):
        r.output_ids = [10, 11, 99, 13]
    longer.output_ids = [*base.output_ids, 14]
    rows = [base, same, tie, wrong, longer, unseen]
    found = {r.key: Divergence("b", "1", 0, r.method, 0, 2, gap) for r, gap in ((tie, 0.0005), (wrong, 3.0))}
    result = known(exactness(list(compared(rows)), found))
    assert (result.identical, result.near_ties, result.wrong, result.unknown) == (1, 1, 2, 1)
    assert (result.compared, result.worst_gap) == (5, 3.0)


def test_what_was_asked_otherwise_is_not_compared():
    base, later = row(turn=1), row("pld", turn=1, prompt_ids=[1, 3])  # its own first answer was another
    assert list(compared([base, later, row("pld", error="x"), row("pld", repeat=1)])) == []


def test_accuracy():
    tasks = {(t.bench, t.id): t for t in (task("1", scoring="number", answer="7"), task("2"))}
    assert score([row(), row(question="2"), row(repeat=1)], tasks, run_code=False) == (1, 1)
    assert score([row(error="too long")], tasks, run_code=False) == (0, 1)
    assert score([row(question="2")], tasks, run_code=False) is None


def test_code_is_run_only_when_asked():
    tasks = {("b", "1"): task(scoring="code", prefix="def f():\n", answer="assert f() == 7\n")}
    answer = row(text="```python\ndef f():\n    return 7\n```")
    assert score([answer], tasks, run_code=False) is None
    assert score([answer], tasks, run_code=True) == (1, 1)


def test_empty_runs_have_no_figures():
    assert tokens_per_second([]) is None
    assert mean_accepted_tokens([row(chunks=[1], decode_steps=0)]) is None
    assert retrieval_success([]) is None
    assert steps_reaching([]) == []
    assert time_share([row()]) == {}


def test_no_comparison():
    assert exactness([], {}) is None
    with pytest.raises(StopIteration):
        next(compared([row("pld")]))
