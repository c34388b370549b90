"""Benchmarks are found where they may be, whatever the form of their rows, and picked from evenly."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from eval_jobs.benchmarks import BENCHMARKS, MT_BENCH_CATEGORIES, BenchmarkError, load_benchmark, pick_per_group


def write(path: Path, *rows: dict) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(autouse=True)
def _nothing_else(monkeypatch, tmp_path):
    monkeypatch.setenv("LOGITSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LOGITSPEC_DATA", raising=False)


def test_the_own_prompts_cover_all_groups_of_spec_bench():
    tasks = load_benchmark("own")
    assert len(tasks) >= 30
    groups = Counter(t.group for t in tasks)
    assert set(groups) == {"mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"}
    assert {t.category for t in tasks if t.group == "mt_bench"} == set(MT_BENCH_CATEGORIES)
    assert all(len(t.turns) == 2 for t in tasks if t.group == "mt_bench")
    assert all(t.scoring == "number" and t.answer for t in tasks if t.group == "math_reasoning")


def test_directories_are_searched_in_order(tmp_path, monkeypatch):
    for name, question in (("named", "a"), ("variable", "b"), ("cache/bench", "c")):
        (tmp_path / name).mkdir(parents=True)
        write(tmp_path / name / "cnndm.jsonl", {"question_id": 1, "category": "summarization", "turns": [question]})
    assert load_benchmark("cnndm")[0].turns == ("c",)
    monkeypatch.setenv("LOGITSPEC_DATA", str(tmp_path / "variable"))
    assert load_benchmark("cnndm")[0].turns == ("b",)
    assert load_benchmark("cnndm", tmp_path / "named")[0].turns == ("a",)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_missing_benchmark_says_where_to_get_it(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it was not installed: no hub
    with pytest.raises(BenchmarkError, match="get it from https://"):
        load_benchmark(name, tmp_path)


def test_mt_bench_is_a_part_of_spec_bench(tmp_path):
    write(
        tmp_path / "spec_bench.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
        {"question_id": 401, "category": "math_reasoning", "turns": ["c"]},
    )
    assert [t.group for t in load_benchmark("spec_bench", tmp_path)] == ["mt_bench", "math_reasoning"]
    assert [t.turns for t in load_benchmark("mt_bench", tmp_path)] == [("a", "b")]


def test_rows_with_answers_become_scored_tasks(tmp_path):
    write(tmp_path / "gsm8k_answers.jsonl", {"question": "How many?", "answer": "1 + 1 = 2\n#### 2"})
    write(tmp_path / "aime24.jsonl", {"id": 60, "problem": "Find n.", "answer": "025"})
    write(tmp_path / "amc23.jsonl", {"id": 0, "problem": "Find m.", "answer": 27.0})
    write(tmp_path / "math.jsonl", {"unique_id": "x/1", "problem": "Simplify.", "answer": "\\frac{1}{2}"})
    write(tmp_path / "longbench.jsonl", {"_id": "q", "context": "Long.", "input": "What?", "dataset": "qasper"})
    found = {name: load_benchmark(name, tmp_path)[0] for name in ("gsm8k", "aime", "amc", "math", "longbench")}
    assert {n: (t.scoring, t.answer) for n, t in found.items()} == {
        "gsm8k": ("number", "2"),
        "aime": ("number", "025"),
        "amc": ("number", "27.0"),
        "math": ("expression", "\\frac{1}{2}"),
        "longbench": (None, None),
    }
    assert "How many?" in found["gsm8k"].turns[0]
    assert found["longbench"].category == "qasper" and found["longbench"].turns == ("Long.\n\nWhat?",)


def test_humaneval_is_read_as_published(tmp_path):
    published = {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": "def check(c): c()"}
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps(published))
    (task,) = load_benchmark("humaneval", tmp_path)
    assert (task.id, task.scoring, task.prefix) == ("HumanEval/0", "code", "def f():\n")
    assert task.answer == "def check(c): c()\ncheck(f)\n"


def test_any_file_in_spec_benchs_schema(tmp_path):
    write(tmp_path / "mine.jsonl", {"question_id": "x", "category": "poems", "turns": ["a"], "answer": 3})
    (task,) = load_benchmark(str(tmp_path / "mine.jsonl"))
    assert (task.bench, task.id, task.group, task.scoring, task.answer) == ("mine", "x", "poems", "number", "3")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not JSON"),
        ("[]", "object"),
        ('{"turns": 3}', "turns"),
        ("", "no tasks"),
        ('\n\n{"turns": ["a"]}\n\n{"turns": 3}', "line 5"),
        ('{"turns": ["a"], "question_id": [1]}', "question_id"),
        ('{"turns": ["a"], "category": 1}', "category"),
        ('{"turns": ["a"], "category": "\\ud800"}', "surrogate"),
        ('{"turns": ["a"], "question_id": null}\n' * 2, None),
        ('{"turns": ["a"]}\n' * 2, None),
    ],
)
def test_broken_files_are_told(tmp_path, content, says):
    path = tmp_path / "broken.jsonl"
    path.write_text(content)
    if says is None:
        assert len(load_benchmark(str(path))) == 2  # rows without ids are numbered
        return
    with pytest.raises(BenchmarkError, match=says):
        load_benchmark(str(path))


def test_the_same_id_twice_is_refused(tmp_path):
    write(tmp_path / "twice.jsonl", *[{"question_id": 1, "turns": ["a"]}] * 2)
    with pytest.raises(BenchmarkError, match="two questions with the id 1"):
        load_benchmark(str(tmp_path / "twice.jsonl"))


def test_unknown_names_and_directories(tmp_path):
    with pytest.raises(BenchmarkError, match="unknown benchmark 'magic'"):
        load_benchmark("magic")
    with pytest.raises(BenchmarkError, match="does not exist"):
        load_benchmark("gsm8k", tmp_path / "nowhere")


def test_picking_is_even_within_each_group():
    tasks = load_benchmark("own")
    picked = pick_per_group(tasks, 2)
    assert Counter(t.group for t in picked) == dict.fromkeys({t.group for t in tasks}, 2)
    multi = [t.category for t in picked if t.group == "mt_bench"]
    assert multi == [MT_BENCH_CATEGORIES[0], MT_BENCH_CATEGORIES[4]]
    assert pick_per_group(tasks, None) == tasks


def test_the_shared_benchmarks_are_all_read():
    directory = Path(__file__).resolve().parents[3] / "shared" / "bench"
    if not directory.is_dir():
        pytest.skip("there are no shared benchmark files here")
    sizes = {"spec_bench": 480, "mt_bench": 80, "humaneval": 164, "gsm8k": 600, "aime": 30, "amc": 40, "cnndm": 200}
    assert {name: len(load_benchmark(name, directory)) for name in sizes} == sizes
