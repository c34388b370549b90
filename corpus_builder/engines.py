"""Engines on all of a Ray cluster, and sharing prompts out among them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from tqdm import tqdm

from cluster.retrieval import CorpusError
from corpus_builder.answering import AnsweringActor, AnswerSettings

_RETRIES = 2  # of a prompt whose engine dies
_PATIENCE_S = 60.0  # before it is said what is waited for

Fields = dict[str, Any]


@contextmanager
def running_engines(settings: AnswerSettings, cpus: int | None) -> Iterator[list[Any]]:
    """Actors with an engine each: one a GPU, or on a cluster without GPUs one for every `cpus` CPUs of a node
    (None: one a node). Those that the cluster has no room for yet are among them. Raises CorpusError.
    """
    number, resources = _share_out(cpus)
    actor_class: Any = ray.remote(AnsweringActor)
    options = {**resources, "max_restarts": -1, "max_task_retries": _RETRIES, "scheduling_strategy": "SPREAD"}
    actors = [actor_class.options(**options).remote(settings) for _ in range(number)]
    try:
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)


def _share_out(cpus: int | None) -> tuple[int, dict[str, float]]:
    """How many engines there can be, and what each takes."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    if gpus:
        return gpus, {"num_gpus": 1, "num_cpus": 1}
    sizes = [int(node["CPU"]) for node in nodes if node.get("CPU", 0) >= 1]
    each = cpus or min(sizes, default=1)
    number = sum(size // each for size in sizes)
    if not number:
        raise CorpusError(f"no node of the Ray cluster has {each} CPUs; use a smaller --cpus")
    return number, {"num_cpus": each}


def share(prompts: Sequence[str], engines: Sequence[Any], batch: int) -> Iterator[tuple[str, Fields | None]]:
    """Every prompt with what an engine says of it, as answers come; None where engine after engine died over it.

    An engine gets prompts once it is ready, and then has `batch` of them at any time. Raises CorpusError when one
    cannot run the model.
    """
    waiting = deque(prompts)
    calls: dict[Any, tuple[Any, str | None]] = {engine.load.remote(): (engine, None) for engine in engines}
    left = len(waiting)
    while left:
        done, _ = ray.wait(list(calls), timeout=_PATIENCE_S)
        if not done and all(prompt is None for _, prompt in calls.values()):
            tqdm.write("waiting for an engine to start; has the Ray cluster room for one?")
        for call in done:
            engine, prompt = calls.pop(call)
            fields = _result(call)
            if prompt is not None:
                left -= 1
                yield prompt, fields
            for _ in range(min(batch if prompt is None else 1, len(waiting))):
                following = waiting.popleft()
                calls[engine.answer.remote(following)] = (engine, following)


def _result(call: Any) -> Fields | None:
    try:
        fields: Fields | None = ray.get(call)
    except RayTaskError as error:
        raise CorpusError(f"an engine failed: {error.cause}") from error
    except RayActorError:
        return None
    return fields
