"""What is left to do: everything once, in an order that is fair to all methods."""

from __future__ import annotations

from eval_jobs.rows import Divergence, Trace
from eval_jobs.sweep.work import missing_answers, missing_divergences, missing_traces
from tests.eval_jobs.runs import row, task

METHODS = ("hf", "vanilla", "pld")


def answers(tasks, done=(), repeats=1, together=1) -> list[list[tuple[str, str, int]]]:
    items = missing_answers(tasks, METHODS, repeats, done, together)
    return [[(",".join(t.id for t in c.arguments[0]), *c.arguments[1:]) for c in item] for item in items]


def test_methods_are_interleaved_and_take_turns_at_being_first():
    found = answers([task("1"), task("2")], repeats=2)
    assert [call[1] for call in found[0]] == ["hf", "vanilla", "pld", "vanilla", "pld", "hf"]
    assert [call[1] for call in found[1]] == ["vanilla", "pld", "hf", "pld", "hf", "vanilla"]
    assert [call[2] for call in found[0]] == [0, 0, 0, 1, 1, 1]
    assert {call[0] for call in found[0]} == {"1"}


def test_only_what_lacks_is_done():
    two_turns = task("1", turns=("a", "b"))
    done = {row("hf", turn=0).key, row("hf", turn=1).key, row("pld", turn=0).key}  # the last one was cut off
    assert answers([two_turns], done) == [[("1", "vanilla", 0), ("1", "pld", 0)]]
    assert answers([task("1")], {row(m).key for m in METHODS}) == [[]]


def test_prompts_that_run_together_do_so_only_where_both_lack():
    tasks = [task("1"), task("2"), task("3")]
    assert answers(tasks, {row("hf", "1").key}, together=2)[0][0] == ("2", "hf", 0)
    assert answers(tasks, together=2)[0][0] == ("1,2", "hf", 0)
    assert answers(tasks, together=2)[1][0] == ("3", "vanilla", 0)


def test_a_trace_of_each_prompt_by_the_best_reference():
    rows = [
        row("hf"),
        row("vanilla"),
        row("vanilla", repeat=1),
        row("hf", "2"),
        row("hf", "3", error="no"),
        row("pld", "4"),
    ]
    (first,), (second,) = missing_traces(rows, [], with_logits=True)
    assert [c.arguments[0].key for c in (first, second)] == [row("vanilla").key, row("hf", "2").key]
    bare = Trace("b", "1", 0, "qa", [1, 2], [10], [])
    assert len(missing_traces(rows, [bare], with_logits=False)) == 1
    assert len(missing_traces(rows, [bare], with_logits=True)) == 2


def test_divergences_are_looked_at_once():
    other, longer = row("pld", output_ids=[10, 11, 0, 0]), row("hf", output_ids=[10, 11, 12, 13, 14])
    ((call,),) = missing_divergences([row(), other, longer, row("logitspec")], [])
    assert (call.arguments[0].method, call.arguments[2]) == ("pld", 2)
    assert missing_divergences([row(), other], [Divergence("b", "1", 0, "pld", 0, 2, 0.1)]) == []
