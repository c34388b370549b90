"""Answers in Spec-Bench's ``model_answer`` format, one line a question, so that its own scripts read them."""

from __future__ import annotations

import json
import uuid
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval_jobs.rows import Row
from eval_jobs.run_directory import RunDirectory

Place = tuple[str, int, int]  # question, turn, repeat


def export_answers(run: RunDirectory, directory: Path) -> list[Path]:
    """Write ``BENCH/model_answer/MODEL-METHOD-DTYPE-temp-T.jsonl`` for every benchmark and method; the files.

    They hold the questions that every method has answered: the scripts compare files line by line, take means over
    all lines, and divide by the time of an answer, which one that failed does not have.
    """
    settings = run.settings
    model = str(settings["model"]).rstrip("/").rpartition("/")[2]
    by_file: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in _answered_by_all(run.rows.read()):
        by_file[row.bench, row.method].append(row)
    files = []
    for (bench, method), rows in by_file.items():
        dtype = next((r.dtype for r in rows if r.dtype), settings["dtype"])
        model_id = f"{model}-{method}-{dtype}-temp-{settings['temperature']}"
        file = directory / bench / "model_answer" / f"{model_id}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(line) + "\n" for line in answer_lines(rows, model_id)]
        file.write_text("".join(lines), encoding="utf-8")
        files.append(file)
    return files


def _answered_by_all(rows: Sequence[Row]) -> list[Row]:
    """Rows of the questions without a failed or missing answer; a method that answered none is left out."""
    asked: dict[str, set[Place]] = defaultdict(set)
    answered: dict[tuple[str, str], set[Place]] = defaultdict(set)
    for row in rows:
        place = row.question, row.turn, row.repeat
        asked[row.bench].add(place)
        if row.error is None:
            answered[row.bench, row.method].add(place)
    lacking = {(bench, place[0]) for (bench, _), places in answered.items() for place in asked[bench] - places}
    return [r for r in rows if (r.bench, r.method) in answered and r.key.conversation not in lacking]


def answer_lines(rows: Sequence[Row], model_id: str) -> list[dict[str, Any]]:
    """A line for each question, by id; repeats are its choices."""
    questions: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        questions[row.question].append(row)
    lines = [_line(question, answers, model_id) for question, answers in questions.items()]
    return sorted(lines, key=lambda line: (isinstance(line["question_id"], str), line["question_id"]))


def _line(question: str, rows: Sequence[Row], model_id: str) -> dict[str, Any]:
    repeats = sorted({row.repeat for row in rows})
    turns = {repeat: sorted((r for r in rows if r.repeat == repeat), key=lambda r: r.turn) for repeat in repeats}
    return {
        "question_id": int(question) if question.isdecimal() else question,
        "category": rows[0].category,
        "answer_id": uuid.uuid4().hex[:22],
        "model_id": model_id,
        "choices": [_choice(repeat, turns[repeat]) for repeat in repeats],
        "tstamp": max(row.started for row in rows),
    }


def _choice(index: int, turns: Sequence[Row]) -> dict[str, Any]:
    return {
        "index": index,
        "turns": [r.text.strip() for r in turns],
        "decoding_steps": [r.decode_steps for r in turns],
        "new_tokens": [len(r.output_ids) for r in turns],
        "wall_time": [r.seconds for r in turns],
        "accept_lengths": [tokens for r in turns for tokens in r.step_tokens],
    }
