"""``python -m eval_jobs simulate``: methods on a run's recorded answers, no model; predicts MAT and speedup.

A method is a name, or ``module:Class`` of a drafter of your own (``cluster.decoding.drafting.Drafter``).
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import ValidationError

from cluster.decoding.adaptive import LARGEST_TREE
from cluster.decoding.drafting import Drafter
from cluster.decoding.fitting import Fitting
from cluster.decoding.methods import CPU_CAPACITY, GPU_CAPACITY, make_drafter
from cluster.decoding.params import CORPUS_METHODS, MAX_CAPACITY, METHODS
from cluster.retrieval import Corpus
from eval_jobs.metrics.acceptance import mean_accepted_tokens
from eval_jobs.rows import STEP_WIDTHS, Row, Trace, TraceKey
from eval_jobs.run_directory import RunDirectory, RunError
from eval_jobs.simulation.replay import Replay, replay, vocabulary
from eval_jobs.simulation.step_times import StepCurve, read_curve
from eval_jobs.sweep.settings import SweepSettings


def add_parser(subcommands: Any) -> None:
    """Declare the command and its options."""
    parser = subcommands.add_parser("simulate", help="methods on recorded answers, no model", description=__doc__)
    parser.add_argument("--traces", required=True, metavar="RUN", help="a sweep with --record-traces")
    parser.add_argument("--methods", default="pld,logitspec,adaptive", help=f"of {','.join(METHODS)}, module:Class")
    parser.add_argument("--capacity", type=int, metavar="N", help="nodes of a tree (default: the run's)")
    parser.add_argument("--corpus", metavar="DIR", help="reference corpus (default: the run's)")
    parser.add_argument(
        "--step-ms", metavar="W:MS,…", help="milliseconds of a step by its width, or a JSON file (default: the run's)"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Replay every method and print the table; with --json one object on the last line.

    Raises:
        RunError: the run has no traces with logits.
    """
    directory = RunDirectory(args.traces)
    settings = _settings(directory)
    traces = [t for t in _in_order(directory) if t.top_ids]
    if not traces:
        raise RunError(f"{args.traces} has no traces; run sweep with --record-traces")
    if args.capacity is not None and not 1 <= args.capacity <= MAX_CAPACITY:
        raise RunError(f"--capacity must be between 1 and {MAX_CAPACITY}, not {args.capacity}")
    curve = read_curve(args.step_ms or str(directory.step_ms_file))
    corpus_path = args.corpus or settings.corpus
    corpus = Corpus.open(corpus_path) if corpus_path else None
    asked = args.capacity if args.capacity is not None else settings.capacity
    rows = directory.rows.read()
    default = CPU_CAPACITY if {r.device for r in rows if r.device} <= {"cpu"} else GPU_CAPACITY
    results = {}
    methods = [m.strip() for m in args.methods.split(",") if m.strip()]
    if not methods:
        raise RunError("--methods names nothing")
    for method in methods:
        drafter = _drafter(method, corpus, traces)
        is_sized = asked is None and method in METHODS  # by the time that steps take, as the engine does
        is_budgeted = is_sized and method == "adaptive"
        capacity = asked or (LARGEST_TREE if is_budgeted else default)
        limit, temperature = settings.max_new_tokens, settings.temperature
        told = _told(rows if args.step_ms is None else [], method) if is_sized else None
        fitting = Fitting() if is_sized and not is_budgeted else None
        found = replay(drafter, traces, capacity, limit, curve, told, temperature, fitting)
        results[method] = _figures(found, _measured(rows, traces, method) if asked == settings.capacity else None)
    print(_table(results))
    if args.json:
        print(json.dumps({"answers": len(traces), "capacity": asked, "methods": results}))


def _settings(directory: RunDirectory) -> SweepSettings:
    known = {name: value for name, value in directory.settings.items() if name in SweepSettings.model_fields}
    try:
        return SweepSettings.model_validate(known, strict=True)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise RunError(f"{directory.path / 'run.json'} is damaged: {wrong['loc'][0]}: {wrong['msg']}") from error


def _in_order(directory: RunDirectory) -> list[Trace]:
    """The run's traces in the order in which one actor answers the tasks."""
    places = {(task.bench, task.id): i for i, task in enumerate(directory.tasks)}
    return sorted(directory.traces.read(), key=lambda t: (places.get((t.bench, t.question), len(places)), t.turn))


def _drafter(name: str, corpus: Corpus | None, traces: Sequence[Trace]) -> Drafter:
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            made = getattr(importlib.import_module(module), attribute)()
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise RunError(f"no drafter {name}: {error}") from error
        if not isinstance(made, Drafter):
            raise RunError(f"no drafter {name}: derive it from cluster.decoding.drafting.Drafter")
        return made
    method = next((m for m in METHODS if m == name), None)
    if method is None:
        raise RunError(f"unknown method {name}; choose from {', '.join(METHODS)}, or name a module:Class")
    if method in CORPUS_METHODS and corpus is None:
        raise RunError(f"method {name} drafts from a reference corpus; give one (--corpus DIR)")
    return make_drafter(method, vocabulary(traces, corpus), corpus)


def _told(rows: Sequence[Row], method: str) -> dict[TraceKey, StepCurve]:
    """How long steps take, as the engine expected it during answers for which it drafted by that: the method's own, or
    any if the run has none of it.
    """
    widths = np.array(STEP_WIDTHS, np.float64)
    told = sorted((r for r in rows if r.step_seconds and not r.repeat), key=lambda r: r.method == method)
    return {r.key.prompt: StepCurve(widths, np.array(r.step_seconds)) for r in told}


def _measured(rows: Sequence[Row], traces: Sequence[Trace], method: str) -> float | None:
    """MAT of the engine on the same prompts, where the run has the method."""
    prompts = {(t.key, tuple(t.prompt_ids)) for t in traces}
    same = [r for r in rows if r.method == method and (r.key.prompt, tuple(r.prompt_ids)) in prompts]
    return mean_accepted_tokens(same)


def _figures(found: Replay, measured: float | None) -> dict[str, float | None]:
    return {
        "tokens": found.tokens,
        "steps": found.steps,
        "mat": round(found.mean_accepted_tokens, 4),
        "measured_mat": None if measured is None else round(measured, 4),
        "nodes_per_step": round(1 + found.drafted / max(found.steps, 1), 2),
        "speedup_vs_vanilla": round(found.speedup, 4),
    }


def _table(results: dict[str, dict[str, float | None]]) -> str:
    lines = [f"{'method':<12} {'MAT':>6} {'measured':>9} {'nodes/step':>10} {'×vanilla':>8}"]
    for name, f in results.items():
        measured = "-" if f["measured_mat"] is None else f"{f['measured_mat']:.2f}"
        lines.append(
            f"{name:<12} {f['mat']:>6.2f} {measured:>9} {f['nodes_per_step']:>10.1f} {f['speedup_vs_vanilla']:>8.2f}"
        )
    return "\n".join(lines)
