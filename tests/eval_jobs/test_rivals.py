"""The comparison with other systems: what needs no network and none of them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from cluster.prompts import PromptFileError
from eval_jobs.benchmarks import load_benchmark
from eval_jobs.rivals import running
from eval_jobs.rivals.catalogue import RIVALS, Rival
from eval_jobs.rivals.command import (
    format_table,
    make_request,
    parse_names,
    pick_over_groups,
    prepare,
    run_rival,
    summarize,
)
from eval_jobs.rivals.environments import EnvironmentFailure, environment_python
from eval_jobs.rivals.running import Answers, RivalFailure, answer, interpreter


@pytest.fixture
def request_of_two(model_dir):
    args = argparse.Namespace(model=model_dir, dtype="float32", device="cpu", max_new_tokens=6)
    return make_request(args, load_benchmark("own")[:2])


def test_ours_and_hugging_faces_runner_agree_alone_and_at_once(request_of_two):
    python = Path(sys.executable)
    expected = answer(Rival("hf_runner.py", None), python, request_of_two | {"at_once": 1}, 100)
    assert expected.seconds > 0 and all(expected.token_ids)
    for rival in (Rival("hf_runner.py", None), RIVALS["adaptive"]):
        assert answer(rival, python, request_of_two | {"at_once": 2}, 100).token_ids == expected.token_ids


def test_a_runner_that_fails_says_why_in_one_line(request_of_two):
    with pytest.raises(RivalFailure, match=r"^[^\n]*Error[^\n]*$"):
        answer(RIVALS["vllm"], Path(sys.executable), request_of_two | {"at_once": 1}, 100)


def test_a_runner_that_takes_too_long_is_ended(request_of_two):
    with pytest.raises(RivalFailure, match="no answer after 0 s"):
        answer(RIVALS["vanilla"], Path(sys.executable), request_of_two | {"at_once": 1}, 0.2)


def test_environments_are_made_once_and_told_apart_by_what_is_in_them(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGITSPEC_CACHE", str(tmp_path / "cache"))
    python = environment_python([])
    assert python.exists() and environment_python([]) == python
    with pytest.raises(EnvironmentFailure, match="pip"):
        environment_python([["--no-index", "no-such-package-here==1"]])
    assert [p for p in (tmp_path / "cache").iterdir() if p.name.startswith("environment")] == [python.parents[1]]


def test_what_cannot_be_installed_is_told_in_its_row(request_of_two, monkeypatch):
    def fail(requirements):
        raise EnvironmentFailure("pip: ERROR: no such thing")

    monkeypatch.setattr(running, "environment_python", fail)
    rows = {"vllm": run_rival("vllm", prepare("vllm"), request_of_two, 2, 100)}
    assert "not installed: pip: ERROR: no such thing" in format_table(summarize(rows), 2)


def test_our_own_systems_run_in_this_interpreter():
    assert interpreter(RIVALS["vanilla"]) == Path(sys.executable)


def test_figures_compare_with_hf_of_the_same_way():
    rows: dict[str, dict[str, Answers | str]] = {
        "hf": {"alone": Answers([[1, 2], [3, 4]], 4.0), "at_once": "failed: Error: out of it"},
        "other": {"alone": Answers([[1, 2], [3, 5]], 2.0), "at_once": Answers([[1, 2], [3]], 1.0)},
    }
    figures = summarize(rows)
    assert figures["other"]["alone"] == {
        "tokens": 4,
        "seconds": 2.0,
        "tokens_per_s": 2.0,
        "ratio_to_hf": 2.0,
        "identical_to_hf": 1,
    }
    assert "ratio_to_hf" not in figures["other"]["at_once"]
    assert "| `other` | 2.0 | 2.00 | 1 | 3.0 | – | – |" in format_table(figures, 24).splitlines()


def test_prompts_come_from_all_groups():
    tasks = pick_over_groups(load_benchmark("own"), 8)
    assert len(tasks) == 8 and len({task.group for task in tasks}) == 6


def test_unknown_systems_are_refused():
    with pytest.raises(PromptFileError, match="choose from hf"):
        parse_names("hf,nothing")
