"""Simulated drafting agrees with the engine that it leaves out."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import eval_jobs.__main__ as command
from cluster.decoding.drafting import Draft, Drafter
from cluster.decoding.methods import make_drafter
from cluster.decoding.tree import CONTEXT, TreeBuilder
from eval_jobs.benchmarks import load_benchmark
from eval_jobs.rows import STEP_WIDTHS
from eval_jobs.run_directory import RunDirectory
from eval_jobs.simulation.replay import replay
from eval_jobs.simulation.step_times import StepTimesError, read_curve
from eval_jobs.sweep.answering import Answerer
from eval_jobs.sweep.settings import SweepSettings
from tests.eval_jobs.conftest import write_bench, write_text_corpus

METHODS = ["vanilla", "pld", "rest", "logitspec", "adaptive"]
PROMPTS = 40


@pytest.fixture(scope="module")
def recorded(model_dir, tmp_path_factory) -> RunDirectory:
    """A run of 40 prompts with traces, made in this process as an actor makes it."""
    directory = tmp_path_factory.mktemp("recorded")
    corpus = write_text_corpus(directory / "corpus", model_dir, "Say qa and again Say rag and again " * 4)
    settings = SweepSettings(
        model=model_dir, dtype="float32", max_new_tokens=48, capacity=16, corpus=corpus, record_traces=True
    )
    tasks = load_benchmark(write_bench(directory / "bench.jsonl", 5))
    answerer = Answerer(settings, METHODS)
    run = RunDirectory(directory / "run")
    run.describe(settings.model_dump(), tasks)
    for method in METHODS:
        rows = [row for task in tasks for row in answerer.answer([task], method, 0)]
        run.rows.append(rows)
        if method == "vanilla":
            run.traces.append([answerer.trace(row) for row in rows[:PROMPTS]])
    run.write_step_ms(answerer.step_ms())
    return run


def simulate(run: RunDirectory, *arguments: str) -> int:
    return command.main(["simulate", "--traces", str(run.path), *arguments])


def test_it_agrees_with_the_engine(recorded, capsys):
    assert simulate(recorded, "--methods", ",".join(METHODS), "--json") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["answers"] == PROMPTS
    for method, figures in result["methods"].items():
        assert figures["mat"] == pytest.approx(figures["measured_mat"], rel=0.03), method
    assert result["methods"]["vanilla"]["mat"] == result["methods"]["vanilla"]["speedup_vs_vanilla"] == 1.0
    assert result["methods"]["logitspec"]["mat"] > 1.1


def test_speedup_follows_the_curve(recorded, capsys):
    for curve, expected in (("1:10,64:10", "mat"), ("1:10,2:1000,64:1000", None)):
        assert simulate(recorded, "--methods", "logitspec", "--step-ms", curve, "--json") == 0
        figures = json.loads(capsys.readouterr().out.splitlines()[-1])["methods"]["logitspec"]
        if expected:
            assert figures["speedup_vs_vanilla"] == pytest.approx(figures["mat"], abs=1e-3)
        else:
            assert figures["speedup_vs_vanilla"] < 0.1


CURVES = {"flat": read_curve("1:10,64:11"), "steep": read_curve("1:10,64:640")}


def test_adaptive_drafts_what_the_curve_makes_worthwhile(recorded):
    nodes = {}
    traces = [t for t in recorded.traces.read() if t.top_ids][:8]
    for name, curve in CURVES.items():
        found = replay(make_drafter("adaptive", 300), traces, 64, 48, curve, {t.key: curve for t in traces})
        nodes[name] = found.drafted / found.steps
    assert nodes["flat"] > 4 * nodes["steep"]


def test_adaptive_is_told_the_step_times_that_the_engine_drafted_by(recorded, tmp_path, capsys):
    rows = [r for r in recorded.rows.read() if r.method == "adaptive"]
    nodes = {}
    for name, curve in CURVES.items():
        run = RunDirectory(tmp_path / name)
        run.describe({**recorded.settings, "capacity": None}, recorded.tasks)
        run.traces.append(recorded.traces.read()[:8])
        expected = curve(np.array(STEP_WIDTHS, np.float64)).tolist()
        run.rows.append([replace(row, step_seconds=expected) for row in rows])
        run.write_step_ms({1: 10.0, 64: 640.0})
        assert simulate(run, "--methods", "adaptive", "--json") == 0
        figures = json.loads(capsys.readouterr().out.splitlines()[-1])["methods"]["adaptive"]
        nodes[name] = figures["nodes_per_step"] - 1
    assert nodes["flat"] > 4 * nodes["steep"]


class Oracle(Drafter):
    """A drafter of somebody else's: it repeats the last token."""

    def propose(self, contexts, costs=None):
        drafts = []
        for context in contexts:
            builder = TreeBuilder(context.capacity)
            last = context.index.tokens[-1]
            builder.reset(int(last))
            builder.add_path(np.full(min(3, context.max_depth), last, np.int32), CONTEXT)
            drafts.append(Draft(builder.build(), retrieved=True))
        return drafts


def test_ideas_of_ones_own(recorded):
    (trace, *_) = recorded.traces.read()
    steady = replace(trace, output_ids=[7] * 9, top_ids=[7, 8] * 9, top_logits=[1.0, 0.0] * 9)
    found = replay(Oracle(), [steady], 4, 9, read_curve("1:10"), told=None)
    assert (found.tokens, found.steps, found.mean_accepted_tokens) == (8, 2, 4.0)


def test_a_class_is_named_by_its_module(recorded, capsys):
    assert simulate(recorded, "--methods", "cluster.decoding.lookup_methods:PromptLookup,pld", "--json") == 0
    methods = json.loads(capsys.readouterr().out.splitlines()[-1])["methods"]
    assert methods["cluster.decoding.lookup_methods:PromptLookup"]["mat"] == methods["pld"]["mat"]


@pytest.mark.parametrize("text", ["2:10", "1:0", "1:x", "1:nan", "nonsense", "1"])
def test_curves_that_are_none(text):
    with pytest.raises(StepTimesError, match="step times"):
        read_curve(text)


def test_curves_are_linear_and_go_on():
    curve = read_curve("1:10,3:20")
    assert curve(np.array([1.0, 2.0, 3.0, 5.0])).tolist() == pytest.approx([0.01, 0.015, 0.02, 0.03])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--methods", "magic"], "magic"),
        (["--methods", "no.module:Drafter"], "no.module"),
        (["--capacity", "0"], "between 1 and 256"),
        (["--capacity", "257"], "between 1 and 256"),
        (["--step-ms", "1"], "step times"),
        (["--corpus", "./nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_told_in_a_line(recorded, capsys, arguments, says):
    assert simulate(recorded, *arguments) == 2
    captured = capsys.readouterr()
    assert says in captured.err and "Traceback" not in captured.err


def test_a_run_without_traces(tmp_path, capsys):
    RunDirectory(tmp_path).describe(SweepSettings().model_dump(), [])
    assert simulate(RunDirectory(tmp_path)) == 2
    assert "--record-traces" in capsys.readouterr().err
