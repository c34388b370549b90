"""``python -m eval_jobs sweep``: benchmarks × methods × repeats on a Ray cluster, into a directory; resumable."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from cluster.cli.options import add_capacity_option, add_corpus_options, add_model_options
from cluster.decoding.params import CORPUS_METHODS
from eval_jobs.benchmarks import Task, load_benchmark, pick_per_group
from eval_jobs.options import add_bench_option, add_length_option
from eval_jobs.run_directory import RunDirectory, RunError
from eval_jobs.systems import SYSTEMS

_LOCK_WAIT_S = 30  # a sweep that was just killed may take a moment to go


def add_parser(subcommands: Any) -> None:
    """Declare the command and its options."""
    parser = subcommands.add_parser("sweep", help="benchmarks × methods across a cluster", description=__doc__)
    add_model_options(parser)
    add_capacity_option(parser)
    add_corpus_options(parser)
    add_bench_option(parser)
    parser.add_argument("--limit-per-group", type=int, metavar="N", help="N tasks of each group (default: all)")
    parser.add_argument("--methods", default="hf,vanilla,pld,logitspec", help=f"of {','.join(SYSTEMS)}")
    parser.add_argument(
        "--repeats", type=int, default=1, metavar="N", help="answers of a method to a task (default: 1)"
    )
    add_length_option(parser)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--concurrency", type=int, default=1, metavar="N", help="prompts an actor answers at once")
    parser.add_argument("--record-traces", action="store_true", help="keep top logits, for simulate")
    parser.add_argument("--out", required=True, metavar="RUN", help="directory; what is there is not done again")
    parser.add_argument("--address", help="Ray cluster, or 'local' for one of its own (default: the one Ray finds)")
    parser.add_argument("--actors", type=int, metavar="N", help="actors (default: as many as the cluster holds)")
    parser.add_argument("--cpus-per-actor", type=float, metavar="N")
    parser.add_argument("--gpus-per-actor", type=float, metavar="N", help="may be a fraction")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do what is missing of the sweep, then say where the report comes from."""
    from eval_jobs.compare import parse_systems
    from eval_jobs.sweep.settings import SweepSettings

    methods = parse_systems(args.methods)
    needing = [m for m in methods if m in CORPUS_METHODS]
    if needing and args.corpus is None:
        raise RunError(f"method {needing[0]} drafts from a reference corpus; give one (--corpus DIR)")
    if args.repeats < 1 or (args.actors is not None and args.actors < 1):
        raise RunError("--repeats and --actors must be at least 1")
    if any(share is not None and not 0 <= share < math.inf for share in (args.cpus_per_actor, args.gpus_per_actor)):
        raise RunError("--cpus-per-actor and --gpus-per-actor must be numbers from 0 on")
    settings = SweepSettings(
        model=_absolute(args.model),
        dtype=args.dtype,
        device=args.device,
        corpus=None if args.corpus is None else _absolute(args.corpus),
        retrieval=args.retrieval,
        capacity=args.capacity,
        temperature=args.temperature,
        max_new_tokens=args.max_new_tokens,
        concurrency=args.concurrency,
        record_traces=args.record_traces,
    )
    tasks = _tasks(args)
    directory = RunDirectory(args.out)
    if directory.exists and (differences := settings.differences(directory.settings)):
        raise RunError(
            f"{directory.path} holds a sweep with other settings ({'; '.join(differences)}); name another --out"
        )
    with _locked(directory):
        from eval_jobs.sweep.driver import sweep

        try:
            sweep(directory, settings, tasks, methods, args)
        except KeyboardInterrupt:
            print(f"interrupted; the same command goes on with what is in {args.out}", file=sys.stderr)
            raise
    print(f"done; python -m eval_jobs report {args.out}", file=sys.stderr)


def _tasks(args: argparse.Namespace) -> list[Task]:
    return [t for name in args.bench for t in pick_per_group(load_benchmark(name, args.data_dir), args.limit_per_group)]


def _absolute(name: str) -> str:
    """A local path as any process of this machine understands it; other names as they are."""
    return os.path.abspath(name) if Path(name).exists() else name


@contextmanager
def _locked(directory: RunDirectory) -> Iterator[None]:
    directory.path.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory.path / ".lock")
    try:
        lock.acquire(timeout=_LOCK_WAIT_S)
    except Timeout as error:
        raise RunError(f"another sweep is writing to {directory.path}") from error
    try:
        yield
    finally:
        lock.release()
