"""What is left to do of a sweep: pure functions of the tasks asked for and the records there are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from eval_jobs.benchmarks import Task
from eval_jobs.comparison import divergence
from eval_jobs.metrics.pairs import compared, reference_rows
from eval_jobs.rows import Divergence, Key, Row, Trace
from eval_jobs.sweep.pool import Call


def missing_answers(
    tasks: Sequence[Task], methods: Sequence[str], repeats: int, done: Collection[Key], together: int
) -> list[list[Call]]:
    """Items of ``together`` tasks each: what they lack, repeat by repeat and method by method.

    A conversation is done when its last turn is there. The order of the methods turns by one with each item, so that
    none is always first, and drift of the machine hits all alike.
    """
    finished = {(k.conversation, k.method, k.repeat, k.turn) for k in done}
    items = []
    for n, at in enumerate(range(0, len(tasks), together)):
        members = tasks[at : at + together]
        calls = []
        for repeat in range(repeats):
            first = (n + repeat) % len(methods)
            for method in (*methods[first:], *methods[:first]):
                lacking = [t for t in members if ((t.bench, t.id), method, repeat, len(t.turns) - 1) not in finished]
                if lacking:
                    calls.append(Call("answer", (lacking, method, repeat)))
        items.append(calls)
    return items


def missing_traces(rows: Sequence[Row], traces: Iterable[Trace], with_logits: bool) -> list[list[Call]]:
    """A trace of each prompt's answer by the reference method, where there is none, or none with logits if wanted.

    They come in the order of the answers, as what is traced depends on what drafting learns on the way.
    """
    there = {t.key for t in traces if t.top_ids or not with_logits}
    return [
        [Call("trace", (row,))]
        for row in sorted(reference_rows(rows).values(), key=lambda r: r.started)
        if row.repeat == 0 and row.output_ids and row.key.prompt not in there
    ]


def missing_divergences(rows: Sequence[Row], known: Iterable[Divergence]) -> list[list[Call]]:
    """Where answers part from vanilla's and nobody has looked yet how near a tie it was."""
    there = {d.key for d in known}
    return [
        [Call("divergence", (row, base, position))]
        for row, base in compared(rows)
        if row.key not in there and (position := divergence(row.output_ids, base.output_ids)) is not None
    ]
