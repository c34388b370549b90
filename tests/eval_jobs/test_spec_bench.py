"""What Spec-Bench's ``evaluation/speed.py`` and ``evaluation/equal.py`` make of the answers that a report exports.

Their reading is done here once more: ``speed`` looks at each line's ``category`` and, of its first choice, at
``new_tokens`` and ``wall_time`` (summed over turns) and at ``accept_lengths`` (all of them in one list); of the
baseline it tokenizes the ``turns`` instead, less one token each. ``equal`` compares the ``turns`` of two files line by
line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from eval_jobs.metrics.summary import summarize
from eval_jobs.report.spec_bench import export_answers
from eval_jobs.run_directory import RunDirectory
from tests.eval_jobs.runs import SETTINGS, known, row, task

GROUPS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
TEXTS = ("The answer is 7.", 'Two\nlines, a "quote"', "naïve – 数", "  spaces around ")


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, what every method answers in each turn, and how long vanilla takes a turn."""

    id: str
    category: str
    group: str
    turns: int
    text: str
    seconds: float


def _question(number: int, category: str) -> Question:
    group = "mt_bench" if category in MT_BENCH else category
    turns = 2 if category in MT_BENCH else 1
    return Question(str(95 + number), category, group, turns, TEXTS[number % 4], 1 + number / 10)


# Two of every category, with ids of two and of three digits.
QUESTIONS = [_question(n, category) for n, category in enumerate([*MT_BENCH, *GROUPS[1:]] * 2)]
PACE = {"hf": 2.0, "vanilla": 1.0, "pld": 0.5}


@pytest.fixture
def exported(tmp_path) -> tuple[RunDirectory, Path]:
    """hf, vanilla and pld, twice; the first question failed under pld, the last one is not done yet under vanilla."""
    run = RunDirectory(tmp_path / "run")
    run.describe(SETTINGS, [task(q.id, category=q.category, group=q.group, turns=("x",) * q.turns) for q in QUESTIONS])
    for method, pace in PACE.items():
        for q in QUESTIONS if method != "vanilla" else QUESTIONS[:-1]:
            more = {
                "category": q.category,
                "group": q.group,
                "text": q.text,
                "chunks": [1, 2, 1] if method == "pld" else [1] * 4,
                "error": "it broke" if method == "pld" and q == QUESTIONS[0] else None,
            }
            places = [(turn, repeat) for turn in range(q.turns) for repeat in range(2)]
            run.rows.append(
                [row(method, q.id, pace * q.seconds * (1 + r), turn=turn, repeat=r, **more) for turn, r in places]
            )
    export_answers(run, tmp_path / "answers")
    return run, tmp_path / "answers" / "b" / "model_answer"


def test_speed_says_what_the_report_says(exported, model_dir):
    run, answers = exported
    figures = summarize(run).methods["pld"]
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    for group in (*GROUPS, "overall"):
        ours, base, lengths = speed(answers, "pld", "hf", tokenizer, group)
        done = [q for q in QUESTIONS[1:-1] if group in ("overall", q.group)]
        assert ours == pytest.approx(mean(4 / (PACE["pld"] * q.seconds) for q in done))
        # The scripts count the baseline's tokens in its text, the report those that were generated.
        written = [len(tokenizer(q.text.strip()).input_ids) - 1 for q in done]
        rates = [tokens / (PACE["hf"] * q.seconds) for tokens, q in zip(written, done, strict=True)]
        assert base == pytest.approx(mean(rates))
        assert known(figures[group].speedups["hf"]).median == pytest.approx(PACE["hf"] / PACE["pld"])
        assert mean(lengths) == figures[group].mean_accepted_tokens == 1.5


def test_equal_finds_equal_answers_equal(exported):
    _, answers = exported
    assert equal(answers, "pld", "vanilla") and equal(answers, "hf", "vanilla")
    file = path(answers, "pld")
    lines = file.read_text("utf-8").splitlines()
    changed = json.loads(lines[3])
    changed["choices"][0]["turns"][-1] += "!"
    file.write_text("\n".join([*lines[:3], json.dumps(changed), *lines[4:]]), "utf-8")
    assert not equal(answers, "pld", "vanilla")


def test_files_have_the_same_questions_in_their_order(exported):
    _, answers = exported
    expected = [int(q.id) for q in QUESTIONS[1:-1]]
    for method in PACE:
        assert [line["question_id"] for line in read(answers, method)] == expected


def speed(
    answers: Path, method: str, base: str, tokenizer: PreTrainedTokenizerBase, group: str
) -> tuple[float, float, list[int]]:
    """Mean tokens a second over questions of a method and of a baseline, and the method's accepted lengths."""

    def of_group(lines):
        wanted = {"mt_bench": MT_BENCH}.get(group, (group,))
        return [line["choices"][0] for line in lines if group == "overall" or line["category"] in wanted]

    mine = of_group(read(answers, method))
    theirs = of_group(read(answers, base))
    counted = [sum(len(tokenizer(text).input_ids) - 1 for text in choice["turns"]) for choice in theirs]
    return (
        mean(sum(choice["new_tokens"]) / sum(choice["wall_time"]) for choice in mine),
        mean(tokens / sum(choice["wall_time"]) for tokens, choice in zip(counted, theirs, strict=True)),
        [length for choice in mine for length in choice["accept_lengths"]],
    )


def equal(answers: Path, one: str, other: str) -> bool:
    """Whether two files, line by line, have the same turns."""
    turns = [[str(line["choices"][0]["turns"]) for line in read(answers, method)] for method in (one, other)]
    return all(a == b for a, b in zip(*turns, strict=True))


def path(answers: Path, method: str) -> Path:
    return answers / f"tiny-{method}-float32-temp-0.0.jsonl"


def read(answers: Path, method: str) -> list[dict]:
    with path(answers, method).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]
