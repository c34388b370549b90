"""Rows and runs for tests, made by hand."""

from __future__ import annotations

from typing import Any, TypeVar

from eval_jobs.benchmarks import Task
from eval_jobs.rows import Row

T = TypeVar("T")

SETTINGS: dict[str, Any] = {
    "model": "models/tiny",
    "dtype": "float32",
    "temperature": 0.0,
    "max_new_tokens": 4,
    "capacity": 8,
    "concurrency": 1,
    "corpus": None,
}


def row(method: str = "vanilla", question: str = "1", seconds: float = 1.0, **more: Any) -> Row:
    """An answer of four tokens; by default every step emits one."""
    chunks = more.pop("chunks", [1, 1, 1, 1])
    tokens = sum(chunks)
    values: dict[str, Any] = {
        "bench": "b",
        "turn": 0,
        "repeat": 0,
        "category": "qa",
        "group": "qa",
        "prompt_ids": [1, 2],
        "output_ids": list(range(10, 10 + tokens)),
        "text": "The answer is 7.",
        "finish_reason": "length",
        "chunk_tokens": chunks,
        "chunk_seconds": [seconds * (i + 1) / len(chunks) for i in range(len(chunks))],
        "decode_steps": len(chunks) - 1,
        "device": "cpu",
        "dtype": "float32",
        "node": "n",
        "started": 5.0,
    }
    return Row(method=method, question=question, seconds=seconds, busy_seconds=seconds, **{**values, **more})


def task(question: str = "1", **more: Any) -> Task:
    """The task of such a row."""
    values: dict[str, Any] = {"bench": "b", "category": "qa", "group": "qa", "turns": ("What?",)}
    return Task(id=question, **{**values, **more})


def known(value: T | None) -> T:
    """The value, which is there."""
    assert value is not None
    return value
