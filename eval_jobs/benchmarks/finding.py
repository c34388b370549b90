"""Find a benchmark: a file, a data directory, the cache, the prompts that come with the package, or the hub."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from cluster.models.cache import cache_dir
from cluster.prompts import PromptFileError, evenly_spaced, read_prompts
from eval_jobs.benchmarks.catalogue import BENCHMARKS, Benchmark, MakeTask, conversation
from eval_jobs.benchmarks.tasks import Task

OWN = "own"  # the prompts that come with the package
DATA_VARIABLE = "LOGITSPEC_DATA"


class BenchmarkError(PromptFileError):
    """A benchmark that is nowhere to be found or cannot be read; the message says where to get it."""


def load_benchmark(name: str, data_dir: str | Path | None = None) -> list[Task]:
    """All tasks of a benchmark.

    Args:
        name: ``own``, a name of the catalogue, or the path of a JSONL file in Spec-Bench's schema.
        data_dir: where to look first; then in $LOGITSPEC_DATA, the cache's ``bench``, and on the hub.

    Raises:
        BenchmarkError: it is not there, or a row cannot be read.
    """
    if name == OWN:
        with resources.as_file(resources.files("eval_jobs") / "data" / "own.jsonl") as file:
            return _read([file], OWN, conversation)
    if name.endswith((".jsonl", ".jsonl.gz")):
        return _read([Path(name)], Path(name).name.split(".")[0], conversation)
    if name not in BENCHMARKS:
        known = ", ".join((OWN, *BENCHMARKS))
        raise BenchmarkError(f"unknown benchmark {name!r}; choose from {known}, or name a .jsonl file")
    bench = BENCHMARKS[name]
    directories = _directories(data_dir)
    for directory in directories:
        for pattern in bench.files:
            if files := sorted(directory.glob(pattern)):
                return _read(files, name, bench.make_task)
    return _from_hub(name, bench, directories)


def first_turns(bench: str, limit: int | None, data_dir: str | Path | None = None) -> list[str]:
    """First turns of ``limit`` tasks, evenly spaced, of a prompt file or of a benchmark (see ``load_benchmark``).

    Raises:
        PromptFileError: it is not there, or a row cannot be read.
    """
    if bench == OWN or bench in BENCHMARKS or not Path(bench).exists():
        return [task.turns[0] for task in evenly_spaced(load_benchmark(bench, data_dir), limit)]
    return [prompt.turns[0] for prompt in read_prompts(bench, limit)]


def _directories(data_dir: str | Path | None) -> list[Path]:
    if data_dir is not None and not Path(data_dir).is_dir():
        raise BenchmarkError(f"the data directory {data_dir} does not exist")
    named = [data_dir, os.environ.get(DATA_VARIABLE)]
    return [Path(d) for d in named if d] + [cache_dir() / "bench"]


def _read(files: Iterable[Path], name: str, make_task: MakeTask) -> list[Task]:
    tasks: list[Task] = []
    for file in files:
        try:
            with (
                gzip.open(file, "rt", encoding="utf-8-sig")
                if file.suffix == ".gz"
                else file.open(encoding="utf-8-sig") as f
            ):
                lines = [(f"{file}, line {n}", line) for n, line in enumerate(f, 1) if line.strip()]
        except (OSError, UnicodeDecodeError, EOFError) as error:
            raise BenchmarkError(f"cannot read the benchmark {file}: {error}") from error
        for number, (where, line) in enumerate(lines, 1):
            tasks += _make(name, number, _parse(line, where), make_task, where)
    return _checked(tasks, name)


def _parse(line: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BenchmarkError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise BenchmarkError(f"{where}: expected an object, found {type(row).__name__}")
    return row


def _make(name: str, number: int, row: Mapping[str, Any], make_task: MakeTask, where: str) -> list[Task]:
    try:
        task = make_task(name, number, row)
    except PromptFileError as error:
        raise BenchmarkError(f"{where}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BenchmarkError(f"{where}: no row of {name}: {error!r}") from error
    return [] if task is None else [task]


def _checked(tasks: list[Task], name: str) -> list[Task]:
    if not tasks:
        raise BenchmarkError(f"the benchmark {name} holds no tasks")
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise BenchmarkError(f"the benchmark {name} has two questions with the id {task.id}")
        seen.add(task.id)
    return tasks


def _from_hub(name: str, bench: Benchmark, directories: list[Path]) -> list[Task]:
    missing = (
        f"the benchmark {name} is not here: no {' or '.join(bench.files)} in "
        f"{', '.join(str(d) for d in directories)}; name its directory (--data-dir, ${DATA_VARIABLE}), or get it from "
        f"{bench.source}"
    )
    if bench.hub is None:
        raise BenchmarkError(missing)
    try:
        import datasets
    except ImportError as error:
        raise BenchmarkError(f"{missing}, or install the package 'datasets' to load it from the hub") from error
    path, configuration, split = bench.hub
    try:
        rows = datasets.load_dataset(path, configuration, split=split)
    except Exception as error:  # whatever the hub, the network or the cache has to complain about
        raise BenchmarkError(f"{missing} ({path} cannot be loaded from the hub: {error})") from error
    made = [_make(name, n, row, bench.make_task, f"{path}, row {n}") for n, row in enumerate(rows, 1)]
    return _checked([task for found in made for task in found], name)
