"""The benchmarks that are known by name: their files, their data sets on the hub, their rows' fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.prompts import parse_prompt
from eval_jobs.benchmarks.tasks import MT_BENCH_CATEGORIES, Task

Row = Mapping[str, Any]
MakeTask = Callable[[str, int, Row], Task | None]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark known by name.

    Attributes:
        files: names its file may have in a data directory, the best first; a pattern takes all that match.
        make_task: a row's task, given the benchmark's name and the row's number; None leaves the row out.
            Raises KeyError, TypeError or ValueError for a row of other fields.
        source: where a person gets the data.
        hub: (path, configuration, split) for ``datasets.load_dataset``, where the hub has it in such rows.
    """

    files: tuple[str, ...]
    make_task: MakeTask
    source: str
    hub: tuple[str, str | None, str] | None = None


def conversation(bench: str, number: int, row: Row) -> Task:
    """A row in Spec-Bench's schema. An ``answer`` beside it is a number to be matched."""
    prompt = parse_prompt(json.dumps(dict(row)), bench, number)
    group = "mt_bench" if prompt.category in MT_BENCH_CATEGORIES else prompt.category
    answer = None if row.get("answer") is None else str(row["answer"])
    scoring = None if answer is None else "number"
    return Task(
        bench=bench,
        id=prompt.id,
        category=prompt.category,
        group=group,
        turns=prompt.turns,
        scoring=scoring,
        answer=answer,
    )


def _mt_bench(bench: str, number: int, row: Row) -> Task | None:
    return conversation(bench, number, row) if row["category"] in MT_BENCH_CATEGORIES else None


def _gsm8k(bench: str, number: int, row: Row) -> Task:
    if "turns" in row:
        return _single_group(bench, number, row)
    text = f"{row['question']}\n\nThink step by step. End with a line that says: The answer is <number>."
    answer = row["answer"].rpartition("####")[2].strip()
    return _scored(bench, str(row.get("idx", number)), text, "number", answer)


def _problem(bench: str, number: int, row: Row) -> Task:
    """A competition problem: its answer is a number."""
    name = row.get("id", row.get("unique_id", number))
    return _scored(bench, str(name), _boxed(row["problem"]), "number", str(row["answer"]))


def _math(bench: str, number: int, row: Row) -> Task:
    """A problem of MATH: its answer is an expression."""
    name = row.get("unique_id", row.get("id", number))
    return _scored(bench, str(name), _boxed(row["problem"]), "expression", str(row["answer"]))


def _humaneval(bench: str, number: int, row: Row) -> Task:
    if "turns" in row:
        return _single_group(bench, number, row)
    asked = "Complete this Python function. Answer with the whole function in one code block."
    text = f"{asked}\n\n```python\n{row['prompt']}```"
    tests = f"{row['test']}\ncheck({row['entry_point']})\n"
    return _scored(bench, row["task_id"], text, "code", tests, row["prompt"])


def _cnndm(bench: str, number: int, row: Row) -> Task:
    if "turns" in row:
        return _single_group(bench, number, row)
    return _scored(bench, str(row["id"]), f"Summarize: {row['article']}")


def _longbench(bench: str, number: int, row: Row) -> Task:
    text = f"{row['context']}\n\n{row['input']}".strip()
    name = str(row.get("_id", number))
    return Task(bench=bench, id=name, category=str(row.get("dataset", bench)), group=bench, turns=(text,))


def _single_group(bench: str, number: int, row: Row) -> Task:
    return conversation(bench, number, row).model_copy(update={"group": bench})


def _scored(bench: str, name: str, text: str, scoring: Any = None, answer: str | None = None, prefix: str = "") -> Task:
    return Task(
        bench=bench, id=name, category=bench, group=bench, turns=(text,), scoring=scoring, answer=answer, prefix=prefix
    )


def _boxed(problem: str) -> str:
    return f"{problem}\n\nSolve this step by step and write the final answer as \\boxed{{answer}}."


BENCHMARKS: dict[str, Benchmark] = {
    "spec_bench": Benchmark(
        ("spec_bench.jsonl", "spec_bench/question.jsonl"),
        conversation,
        "https://github.com/hemingkx/Spec-Bench, data/spec_bench/question.jsonl",
    ),
    "mt_bench": Benchmark(
        ("mt_bench.jsonl", "mt_bench/question.jsonl", "spec_bench.jsonl", "spec_bench/question.jsonl"),
        _mt_bench,
        "https://github.com/lm-sys/FastChat, fastchat/llm_judge/data/mt_bench/question.jsonl",
    ),
    "humaneval": Benchmark(
        ("HumanEval.jsonl.gz", "HumanEval.jsonl", "humaneval.jsonl"),
        _humaneval,
        "https://github.com/openai/human-eval, data/HumanEval.jsonl.gz",
        ("openai/openai_humaneval", None, "test"),
    ),
    "gsm8k": Benchmark(
        ("gsm8k_answers.jsonl", "gsm8k_test.jsonl", "gsm8k.jsonl"),
        _gsm8k,
        "https://github.com/openai/grade-school-math, test.jsonl, saved as gsm8k_test.jsonl",
        ("openai/gsm8k", "main", "test"),
    ),
    "math": Benchmark(
        ("math.jsonl", "math500.jsonl"),
        _math,
        "https://huggingface.co/datasets/HuggingFaceH4/MATH-500, saved as math.jsonl",
        ("HuggingFaceH4/MATH-500", None, "test"),
    ),
    "aime": Benchmark(
        ("aime.jsonl", "aime24.jsonl"),
        _problem,
        "https://huggingface.co/datasets/HuggingFaceH4/aime_2024, saved as aime.jsonl",
        ("HuggingFaceH4/aime_2024", None, "train"),
    ),
    "amc": Benchmark(
        ("amc.jsonl", "amc23.jsonl"),
        _problem,
        "https://huggingface.co/datasets/AI-MO/aimo-validation-amc, saved as amc.jsonl",
        ("AI-MO/aimo-validation-amc", None, "train"),
    ),
    "cnndm": Benchmark(
        ("cnndm.jsonl",),
        _cnndm,
        "https://huggingface.co/datasets/abisee/cnn_dailymail, saved as cnndm.jsonl",
        ("abisee/cnn_dailymail", "3.0.0", "test"),
    ),
    "longbench": Benchmark(
        ("longbench.jsonl", "longbench/*.jsonl"),
        _longbench,
        "https://huggingface.co/datasets/zai-org/LongBench, the files of data.zip in a directory longbench",
    ),
}
