"""The driver of a sweep: gives out what is missing, writes what comes back."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from cluster.cli.progress import Progress
from cluster.ray_connection import ClusterError, connect
from eval_jobs.benchmarks import Task
from eval_jobs.metrics.pairs import is_comparable
from eval_jobs.rows import Divergence, Row, Trace
from eval_jobs.run_directory import RunDirectory
from eval_jobs.sweep.pool import ActorPool, Call, Failure, SweepError, plan
from eval_jobs.sweep.settings import SweepSettings
from eval_jobs.sweep.work import missing_answers, missing_divergences, missing_traces


def sweep(
    directory: RunDirectory,
    settings: SweepSettings,
    tasks: Sequence[Task],
    methods: Sequence[str],
    args: argparse.Namespace,
) -> None:
    """Do everything of the sweep that the directory lacks."""
    directory.describe(settings.model_dump(), tasks)
    items = missing_answers(tasks, methods, args.repeats, {r.key for r in directory.rows.read()}, settings.concurrency)
    if not any(items) and not any(_checks(directory, settings)):
        return
    with _ray(args.address):
        share, count = plan(args.actors, args.cpus_per_actor, args.gpus_per_actor, len(items))
        print(f"actors: {count}, each of {share.cpus:g} CPUs and {share.gpus:g} GPUs", file=sys.stderr)
        pool = ActorPool(settings, methods, share, count)
        try:
            _answer(directory, pool, items)
            _check(directory, pool, _checks(directory, settings))
        finally:
            pool.shutdown()


def _answer(directory: RunDirectory, pool: ActorPool, items: Sequence[Sequence[Call]]) -> None:
    with Progress(sum(len(c.arguments[0]) for item in items for c in item), "answer", "tasks") as progress:
        for call, result in pool.run(items):
            rows = _failed_rows(call, result) if isinstance(result, Failure) else result
            directory.rows.append(rows)
            progress.advance(len(call.arguments[0]), len({r.question for r in rows if r.error is not None}))


def _failed_rows(call: Call, failure: Failure) -> list[Row]:
    tasks, method, repeat = call.arguments
    return [
        Row(t.bench, t.id, turn, method, repeat, t.category, t.group, error=failure.reason)
        for t in tasks
        for turn in range(len(t.turns))
    ]


def _checks(directory: RunDirectory, settings: SweepSettings) -> list[list[Call]]:
    """Step times, traces and divergences that are missing, now that the answers are there."""
    rows = directory.rows.read()
    traces = missing_traces(rows, directory.traces.read(), settings.record_traces)
    comparable = [row for row in rows if is_comparable(row.method, settings.temperature)]
    timing = [] if directory.step_ms_file.exists() else [[Call("step_ms", ())]]
    return timing + traces + missing_divergences(comparable, directory.divergences.read())


def _check(directory: RunDirectory, pool: ActorPool, items: Sequence[Sequence[Call]]) -> None:
    with Progress(len(items), "check", "checks") as progress:
        for call, result in pool.run(items):
            if isinstance(result, Trace):
                directory.traces.append([result])
            elif isinstance(result, Divergence):
                directory.divergences.append([result])
            elif isinstance(result, Failure):
                progress.tell(f"{call.method}: {result.reason}")
            else:
                directory.write_step_ms(result)
            progress.advance(failed=isinstance(result, Failure))


@contextmanager
def _ray(address: str | None) -> Iterator[None]:
    """A connection to a cluster: the one that is there already, the one asked for, or the one Ray finds or starts."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        connect(address, **_local_options(address))
    except ClusterError as error:
        raise SweepError(str(error)) from error
    try:
        yield
    finally:
        ray.shutdown()


def _local_options(address: str | None) -> dict[str, Any]:
    return {"include_dashboard": False} if address == "local" else {}
