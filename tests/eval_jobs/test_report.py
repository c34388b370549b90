"""Reports show every figure; the export is what Spec-Bench's scripts read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import eval_jobs.__main__ as command
from eval_jobs.rows import Trace
from eval_jobs.run_directory import RunDirectory
from tests.eval_jobs.runs import SETTINGS, row, task

_ENGINE = {
    "drafted": {"context": 4},
    "accepted": {"context": 2},
    "drafted_depths": [3, 1],
    "accepted_depths": [1, 1],
    "drafted_ranks": [2],
    "accepted_ranks": [1],
    "retrieved_steps": 1,
    "part_seconds": {"draft": 0.1, "forward": 0.9},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunDirectory:
    """hf, vanilla and pld on two questions of two turns and a single one, twice; one answer of pld failed. Reported."""
    run = RunDirectory(tmp_path_factory.mktemp("runs") / "first")
    multi = {"category": "writing", "group": "mt_bench"}
    run.describe(
        SETTINGS,
        [
            task("81", turns=("a", "b"), **multi),
            task("9", turns=("a", "b"), **multi),
            task("x", scoring="number", answer="7"),
        ],
    )
    for repeat in range(2):
        for method, seconds, more in (("hf", 4.0, {}), ("vanilla", 2.0, {}), ("pld", 1.0, _ENGINE)):
            chunks = [1, 2, 1] if method == "pld" else [1, 1, 1, 1]
            for question in ("81", "9"):
                for turn in range(2):
                    run.rows.append(
                        [row(method, question, seconds, turn=turn, repeat=repeat, chunks=chunks, **multi, **more)]
                    )
            error = "the prompt is too long" if method == "pld" else None
            run.rows.append([row(method, "x", seconds, repeat=repeat, chunks=chunks, error=error, **more)])
    run.traces.append([Trace("b", "81", 0, "mt_bench", [1, 2], [10, 11], [2])])
    assert report(str(run.path), "--title", "A <b> & c") == 0
    return run


def report(*arguments: str) -> int:
    return command.main(["report", *arguments])


def test_every_figure_is_in_the_report(run):
    text = (run.path / "report" / "report.md").read_text()
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert "Multi-turn Conversation" in text and "Question Answering" in text
    for title in (
        "Speedup over Hugging Face generate",
        "Speedup over vanilla steps",
        "Tokens a second",
        "Mean accepted tokens",
        "Latency",
        "Exactness against vanilla",
        "Task accuracy",
        "Acceptance by source",
        "Acceptance by depth",
        "Acceptance by rank",
        "Next-next hit rate",
        "Where the time goes",
        "Failures",
    ):
        assert f"## {title}" in text, title
    assert "| pld | 4.00× | – | 1.50 | 4.00× | 4.00–4.00 | 4.00–4.00 |" in text
    assert "the prompt is too long" in lines["pld"]  # the last table is that of failures
    written = {f.name for f in (run.path / "report").iterdir()}
    plots = {
        f"{name}.{kind}"
        for name in ("speedup_hf", "speedup_vanilla", "depth", "hits", "time")
        for kind in ("svg", "png")
    }
    assert written == {"report.md", "report.html", "summary.json", "answers"} | plots


def test_the_page_needs_nothing_else(run):
    page = (run.path / "report" / "report.html").read_text()
    assert page.count("<svg") == 5
    assert "A &lt;b&gt; &amp; c" in page
    assert "src=" not in page and "<link" not in page and "<script" not in page


def test_runs_are_compared_side_by_side(run, tmp_path, capsys):
    other = RunDirectory(tmp_path / "second")
    other.describe({**SETTINGS, "capacity": 16}, [task("1")])
    other.rows.append([row(), row("pld", seconds=0.5)])
    assert report(str(run.path), str(other.path), "--out", str(tmp_path / "both")) == 0
    text = capsys.readouterr().out
    assert "| first/pld |" in text and "| second/pld | – | 2.00× |" in text
    assert (
        tmp_path / "both" / "answers" / "second" / "b" / "model_answer" / "tiny-pld-float32-temp-0.0.jsonl"
    ).exists()


def test_the_export_has_spec_benchs_fields_types_and_order(run):
    directory = run.path / "report" / "answers" / "b" / "model_answer"
    assert {f.name for f in directory.iterdir()} == {
        f"tiny-{m}-float32-temp-0.0.jsonl" for m in ("hf", "vanilla", "pld")
    }
    lines = read(directory / "tiny-pld-float32-temp-0.0.jsonl")
    assert [line["question_id"] for line in lines] == [9, 81]  # "x" has failed
    line = lines[1]
    assert list(line) == ["question_id", "category", "answer_id", "model_id", "choices", "tstamp"]
    kinds = {"question_id": int, "category": str, "answer_id": str, "model_id": str, "choices": list, "tstamp": float}
    assert {name: type(value) for name, value in line.items()} == kinds
    assert (line["category"], line["model_id"]) == ("writing", "tiny-pld-float32-temp-0.0")
    assert len({one["answer_id"] for one in lines}) == 2
    assert line["choices"] == [
        {
            "index": index,
            "turns": ["The answer is 7."] * 2,
            "decoding_steps": [2, 2],
            "new_tokens": [4, 4],
            "wall_time": [1.0, 1.0],
            "accept_lengths": [2, 1, 2, 1],
        }
        for index in range(2)
    ]
    assert list(line["choices"][0]) == ["index", "turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths"]


def test_mistakes_are_told_in_a_line(tmp_path, capsys):
    assert report(str(tmp_path)) == 2
    assert "holds no run" in capsys.readouterr().err
    RunDirectory(tmp_path).describe(SETTINGS, [task()])
    assert report(str(tmp_path)) == 2
    assert "no rows yet" in capsys.readouterr().err


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
