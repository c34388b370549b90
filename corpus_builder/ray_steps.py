"""Running a build's steps with Ray Data: rows in, one call a row, results out in order."""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

import ray
from ray.data import DataContext, TaskPoolStrategy

from cluster.cli.progress import Progress
from cluster.ray_connection import ClusterError, connect
from cluster.retrieval import CorpusError

_OBJECT_STORE_BYTES = 200 << 20  # rows are a few hundred bytes; all else goes through files


class Step(Protocol):
    """A step of a build: picklable, and small; what takes long to load it loads at the first call."""

    def run(self, number: int, argument: Any) -> Any:
        """The JSON result for one number and JSON argument. Raises CorpusError."""
        ...


def _call(row: dict[str, Any]) -> dict[str, Any]:
    """One call of a step, in a task. Ray keeps worker processes, and with them what steps have loaded."""
    number = int(row["number"])
    try:
        result = json.dumps(_unpickled(row["step"]).run(number, json.loads(row["argument"])))
    except CorpusError as error:
        return {"number": number, "result": "", "error": str(error)}
    return {"number": number, "result": result, "error": ""}


@lru_cache(maxsize=1)
def _unpickled(pickled: bytes) -> Step:
    step: Step = pickle.loads(pickled)
    return step


def run_step(
    step: Step,
    arguments: Sequence[Any],
    workers: int,
    label: str,
    amount: Callable[[Any], int] | None = None,
) -> list[Any]:
    """The results of `step.run(number, argument)` for every argument, in their order.

    A progress bar named `label` shows finished calls, and what `amount` counts in their results as tokens.
    Raises CorpusError with the first error of a call.
    """
    pickled = pickle.dumps(step)
    rows = [
        {"number": number, "argument": json.dumps(value), "step": pickled} for number, value in enumerate(arguments)
    ]
    data = ray.data.from_items(rows, override_num_blocks=min(len(rows), 1000)).map(
        _call, compute=TaskPoolStrategy(size=min(workers, len(rows))), num_cpus=1
    )
    results: list[Any] = [None] * len(rows)
    total = 0
    with Progress(len(rows), label, "parts") as progress:
        for row in data.iter_rows():
            if row["error"]:
                raise CorpusError(row["error"])
            results[row["number"]] = json.loads(row["result"])
            if amount is not None:
                total += amount(results[row["number"]])
            progress.advance(note=f"{total:,} tokens" if amount is not None else "")
    return results


@contextmanager
def ray_session(address: str | None, workers: int) -> Iterator[None]:
    """A connection to the cluster at `address` or $RAY_ADDRESS; without either, one for this process alone."""
    if ray.is_initialized():
        _quiet()
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS")
    local: dict[str, Any] = {}
    if not address:
        # Workers do what the user waits for here; by default they run at the lowest priority but few.
        os.environ.setdefault("RAY_worker_niceness", "0")
        cpus = max(workers, os.cpu_count() or 1)
        local = {"num_cpus": cpus, "object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False}
    try:
        connect(address or "local", **local)
    except ClusterError as error:
        raise CorpusError(str(error)) from error
    try:
        _quiet()
        yield
    finally:
        ray.shutdown()


def _quiet() -> None:
    """The build shows its own progress."""
    DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
