"""Sweeps on a simulated cluster of two nodes, started as users start them."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

import eval_jobs.__main__ as command
from cluster.models import load_tokenizer, render_chat
from eval_jobs.run_directory import RunDirectory
from eval_jobs.systems import SYSTEMS
from tests.eval_jobs.conftest import write_bench, write_text_corpus


@pytest.fixture(scope="module", autouse=True)
def two_nodes() -> Iterator[None]:
    ray.shutdown()
    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()
    cluster.shutdown()


def sweep(model_dir: str, bench: str, out: Path, *arguments: str, tokens: int = 12) -> int:
    fixed = ["--model", model_dir, "--dtype", "float32", "--max-new-tokens", str(tokens), "--capacity", "8"]
    return command.main(["sweep", "--bench", bench, "--out", str(out), *fixed, *arguments])


def test_a_sweep_over_all_methods(model_dir, tmp_path, capsys):
    bench = tmp_path / "bench.jsonl"
    write_bench(bench, 1)
    too_long = {"question_id": 999, "category": "qa", "turns": ["x" * 600, "and now?"]}
    bench.write_text(f"{bench.read_text()}\n{json.dumps(too_long)}")
    methods = [m for m in SYSTEMS if m != "rest"]
    common = ["--methods", ",".join(methods), "--record-traces"]
    assert sweep(model_dir, str(bench), tmp_path / "run", *common) == 0
    run = RunDirectory(tmp_path / "run")
    rows = run.rows.read()
    assert len(rows) == (7 + 2 + 2) * len(methods)

    failed = [r for r in rows if r.error is not None]
    assert {(r.question, r.turn, r.method) for r in failed} == {("999", t, m) for t in range(2) for m in methods}
    assert all("shorten" in (r.error or "") or "context" in (r.error or "") for r in failed if not r.turn)

    answers = {r.key: r for r in rows if r.error is None}
    asked = {(t.bench, t.id): t for t in run.tasks}
    tokenizer = load_tokenizer(model_dir)
    for key, answer in answers.items():
        assert answer.output_ids == answers[key._replace(method="vanilla")].output_ids, key
        assert sum(answer.chunk_tokens) == len(answer.output_ids) == 12
        assert sum(answer.step_tokens) == 11 and len(answer.step_tokens) == answer.decode_steps
        assert 0 < answer.chunk_seconds[0] <= answer.seconds <= answer.busy_seconds + 1e-6
        if key.turn:
            said = answers[key._replace(turn=0)].text
            turns = [{"role": "user", "content": text} for text in asked[key.conversation].turns]
            assert answer.prompt_ids == render_chat(
                tokenizer, [turns[0], {"role": "assistant", "content": said}, turns[1]]
            )

    assert len({r.node for r in rows if r.node}) == 2  # both nodes had a part
    traces = run.traces.read()
    assert len(traces) == 9 and all(len(t.top_ids) == 64 * len(t.output_ids) for t in traces)
    assert all(t.top_ids[64 * i] == token for t in traces for i, token in enumerate(t.output_ids))
    assert run.divergences.read() == []

    files = set((tmp_path / "run" / "rows").iterdir())
    assert sweep(model_dir, str(bench), tmp_path / "run", *common) == 0
    assert set((tmp_path / "run" / "rows").iterdir()) == files  # nothing was done again
    assert command.main(["report", str(tmp_path / "run")]) == 0
    assert "100.0%" in capsys.readouterr().out


def test_batches_with_a_corpus_and_repeats(model_dir, tmp_path):
    corpus = write_text_corpus(tmp_path / "corpus", model_dir, "and writing 0 and coding 1 " * 3)
    bench = write_bench(tmp_path / "bench.jsonl", 1)
    options = ["--corpus", corpus, "--concurrency", "4", "--temperature", "0.8", "--limit-per-group", "1"]
    assert sweep(model_dir, bench, tmp_path / "run", "--methods", "vanilla,rest", *options, "--repeats", "2") == 0
    rows = RunDirectory(tmp_path / "run").rows.read()
    assert len(rows) == 7 * 2 * 2 and all(r.error is None for r in rows)
    answers = {r.key: r for r in rows}
    for key, answer in answers.items():
        assert answer.output_ids == answers[key._replace(method="vanilla")].output_ids
    assert any(r.drafted.get("corpus") for r in rows if r.method == "rest")
    drawn = {tuple(r.output_ids) for r in rows if r.question == "81" and r.turn == 0}
    assert len(drawn) == 2  # a repeat draws anew


def test_losing_an_actor_loses_nothing(model_dir, tmp_path):
    bench = write_bench(tmp_path / "bench.jsonl", 6)
    run = RunDirectory(tmp_path / "run")
    outcome: list[int] = []
    arguments = (model_dir, bench, run.path, "--methods", "vanilla,logitspec", "--repeats", "2")
    thread = threading.Thread(target=lambda: outcome.append(sweep(*arguments, tokens=40)))
    thread.start()
    while not list((run.path / "rows").glob("*.parquet")):
        assert thread.is_alive()
        time.sleep(0.01)
    os.kill(an_actor().pid, signal.SIGKILL)
    assert not outcome  # in the middle of it
    thread.join(120)
    assert outcome == [0]
    rows = run.rows.read()
    assert len(rows) == (6 * 7 + 12) * 2 * 2
    assert all(r.error is None for r in rows)


def an_actor() -> psutil.Process:
    """The process of an actor of ours that answers."""
    ours = psutil.Process().children(recursive=True)
    return next(p for p in ours if "AnswerActor" in " ".join(p.cmdline()))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--methods", "vanilla,magic"], "magic"),
        (["--methods", "rest"], "--corpus"),
        (["--bench", "magic"], "magic"),
        (["--repeats", "0"], "repeats"),
        (["--limit-per-group", "0"], "at least 1"),
        (["--capacity", "0"], "capacity"),
        (["--data-dir", "nowhere", "--bench", "gsm8k"], "nowhere"),
        (["--cpus-per-actor", "64"], "64 CPUs"),
        (["--model", "./nowhere"], "nowhere"),
        (["--corpus", "./nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_told_in_a_line(model_dir, tmp_path, capsys, arguments, says):
    assert sweep(model_dir, "own", tmp_path / "run", *arguments) == 2
    captured = capsys.readouterr()
    assert says in captured.err and "Traceback" not in captured.err


def test_a_run_keeps_to_its_settings(model_dir, tmp_path, capsys):
    RunDirectory(tmp_path).describe({"model": "another"}, [])
    assert sweep(model_dir, "own", tmp_path) == 2
    assert "model is 'another' there" in capsys.readouterr().err
