"""Are the answers right, where the benchmark knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from eval_jobs.benchmarks import Task
from eval_jobs.rows import Row
from eval_jobs.scoring import is_right_expression, is_right_number, program_with_tests, run_program

TaskId = tuple[str, str]


def score(rows: Iterable[Row], tasks: Mapping[TaskId, Task], run_code: bool) -> tuple[int, int] | None:
    """(right, scored) last turns of the first repeat; None if nothing is scored. Code runs only if ``run_code``."""
    right = scored = 0
    for row in rows:
        task = tasks.get(row.key.conversation)
        if task is None or row.repeat or row.turn != len(task.turns) - 1:
            continue
        verdict = _is_right(row, task, run_code)
        if verdict is not None:
            right += verdict
            scored += 1
    return (right, scored) if scored else None


def _is_right(row: Row, task: Task, run_code: bool) -> bool | None:
    if task.scoring is None or task.answer is None or (task.scoring == "code" and not run_code):
        return None
    if row.error is not None:
        return False
    if task.scoring == "number":
        return is_right_number(row.text, task.answer)
    if task.scoring == "expression":
        return is_right_expression(row.text, task.answer)
    return run_program(program_with_tests(row.text, task.prefix, task.answer))
