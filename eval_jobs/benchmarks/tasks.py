"""A task: one conversation to answer, and how its last answer is scored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from cluster.prompts import evenly_spaced

# The categories of MT-bench, which Spec-Bench counts as one group.
MT_BENCH_CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")

Scoring = Literal["number", "expression", "code"]


class Task(BaseModel):
    """One conversation of a benchmark."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bench: str = Field(description="Name of the benchmark.")
    id: str = Field(description="The question's id within it.")
    category: str = Field(description="The category its file gives it.")
    group: str = Field(description="What it is reported under: MT-bench's categories are one group.")
    turns: tuple[str, ...] = Field(description="User messages; each follows the answer to the one before.")
    scoring: Scoring | None = Field(None, description="How the last answer is scored; None if it is not.")
    answer: str | None = Field(None, description="The right answer; for code a program that tests the function.")
    prefix: str = Field("", description="For code: the beginning of the program that is to be completed.")


def pick_per_group(tasks: Sequence[Task], limit: int | None) -> list[Task]:
    """``limit`` tasks of each group, evenly spaced over it, in the order of ``tasks``; all if None."""
    groups: dict[tuple[str, str], list[Task]] = defaultdict(list)
    for task in tasks:
        groups[task.bench, task.group].append(task)
    picked = {task for group in groups.values() for task in evenly_spaced(group, limit)}
    return [task for task in tasks if task in picked]
