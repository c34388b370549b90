"""Actors across the cluster and a queue of work for them that outlives any one of them."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from cluster.prompts import PromptFileError
from eval_jobs.sweep.actor import AnswerActor, Readiness
from eval_jobs.sweep.settings import SweepSettings

_MOST_CRASHES = 3  # of actors at one call before it is given up
_LOOK_AGAIN_S = 1.0
_PATIENCE_S = 60.0
_GATHER_S = 120.0  # from the first loaded actor on


class SweepError(PromptFileError):
    """A sweep that cannot go on; the message says why."""


@dataclass(slots=True, eq=False)
class Call:
    """A method of an actor with its arguments; ``crashes`` counts actors lost at it."""

    method: str
    arguments: tuple[Any, ...]
    crashes: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call has no result."""

    reason: str


@dataclass(slots=True, eq=False)
class _Worker:
    """An actor, what it is doing (None: loading or idle) and what it will do next."""

    handle: Any
    under_way: Any = None
    call: Call | None = None
    item: deque[Call] = field(default_factory=deque)
    is_loaded: bool = False
    crashes: int = 0  # since it last had loaded


@dataclass(frozen=True, slots=True)
class Share:
    """What one actor takes of a node."""

    cpus: float
    gpus: float


class ActorPool:
    """Actors that load once and then take items, lists of calls that stay together on one actor.

    Work begins when all have loaded, as loading disturbs what others measure; those that find no room are not waited
    for long.
    An actor that dies is made again by Ray, on any node with room; the rest of its item goes to whoever is free.
    """

    def __init__(self, settings: SweepSettings, methods: Sequence[str], share: Share, count: int) -> None:
        actor = ray.remote(AnswerActor).options(
            num_cpus=share.cpus, num_gpus=share.gpus, max_restarts=-1, max_task_retries=0, scheduling_strategy="SPREAD"
        )
        self._workers = [_Worker(actor.remote(settings, methods)) for _ in range(count)]
        self._share = share
        self._patience = time.monotonic() + _PATIENCE_S
        self._latest_start = math.inf
        self.ready: list[Readiness] = []
        for worker in self._workers:
            worker.under_way = worker.handle.load.remote()

    def run(self, items: Iterable[Sequence[Call]]) -> Iterator[tuple[Call, Any]]:
        """Results of all calls as they come; a ``Failure`` for a call that raised or that actors kept dying of.

        Raises:
            SweepError: an actor cannot load.
        """
        queue = deque(deque(item) for item in items if item)
        while queue or any(w.call or w.item for w in self._workers):
            if time.monotonic() >= self._latest_start or all(w.is_loaded for w in self._workers):
                self._latest_start = 0.0
                for worker in self._workers:
                    self._occupy(worker, queue)
            refs = {w.under_way: w for w in self._workers if w.under_way is not None}
            done, _ = ray.wait(list(refs), timeout=_LOOK_AGAIN_S)
            self._complain()
            for ref in done:
                outcome = self._collect(refs[ref], queue)
                if outcome is not None:
                    yield outcome

    def shutdown(self) -> None:
        """End the actors."""
        for worker in self._workers:
            ray.kill(worker.handle)

    def _complain(self) -> None:
        """Say once that nothing happens because the cluster has no room."""
        if not self.ready and time.monotonic() > self._patience:
            self._patience = math.inf
            what = f"{self._share.cpus:g} CPUs and {self._share.gpus:g} GPUs"
            print(f"no actor is ready yet; one waits for {what} on one node, or still loads the model", file=sys.stderr)

    def _occupy(self, worker: _Worker, queue: deque[deque[Call]]) -> None:
        if worker.under_way is not None or not worker.is_loaded:
            return
        if not worker.item and queue:
            worker.item = queue.popleft()
        if worker.item:
            worker.call = worker.item.popleft()
            worker.under_way = getattr(worker.handle, worker.call.method).remote(*worker.call.arguments)

    def _collect(self, worker: _Worker, queue: deque[deque[Call]]) -> tuple[Call, Any] | None:
        ref, call = worker.under_way, worker.call
        worker.under_way = worker.call = None
        try:
            result = ray.get(ref)
        except RayTaskError as error:
            result = Failure(f"{type(error.cause).__name__}: {error.cause}".splitlines()[0])
        except RayError as error:  # the actor or its node died, or what it had answered was lost with the node
            return self._lost(worker, call, queue, error)
        if call is not None:
            return call, result
        if not isinstance(result, Readiness) or result.error is not None:
            raise SweepError(result.reason if isinstance(result, Failure) else result.error)
        worker.is_loaded, worker.crashes = True, 0
        self.ready.append(result)
        self._latest_start = min(self._latest_start, time.monotonic() + _GATHER_S)
        return None

    def _lost(
        self, worker: _Worker, call: Call | None, queue: deque[deque[Call]], error: RayError
    ) -> tuple[Call, Any] | None:
        """Put back what a dead actor had, and have its successor load."""
        rest, worker.item, worker.is_loaded = worker.item, deque(), False
        worker.crashes += 1
        if worker.crashes <= _MOST_CRASHES:
            worker.under_way = worker.handle.load.remote()
        else:
            self._workers.remove(worker)
        if not self._workers:
            raise SweepError(f"no actor stays alive: {str(error).splitlines()[0]}")
        given_up = None
        if call is not None:
            call.crashes += 1
            if call.crashes < _MOST_CRASHES:
                rest.appendleft(call)
            else:
                given_up = call, Failure(f"{_MOST_CRASHES} actors died of it")
        if rest:
            queue.appendleft(rest)
        return given_up


def plan(actors: int | None, cpus: float | None, gpus: float | None, items: int) -> tuple[Share, int]:
    """What an actor takes and how many there will be: as many as the cluster's nodes hold, or as many as asked for.

    By default an actor takes one GPU where the cluster has any, else all CPUs of the smallest node.

    Raises:
        SweepError: no node has what an actor is to take.
    """
    nodes = [n["Resources"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU")]
    if gpus is None:
        gpus = 1.0 if any(n.get("GPU") for n in nodes) else 0.0
    if cpus is None:
        cpus = 1.0 if gpus else float(min((n["CPU"] for n in nodes), default=1))
    share = Share(cpus, gpus)
    room = sum(_fits(node, share) for node in nodes)
    if room == 0 and actors is None:
        raise SweepError(
            f"no node of the cluster has {cpus:g} CPUs and {gpus:g} GPUs; change --cpus-per-actor or --gpus-per-actor"
        )
    return share, max(1, min(actors or room, items))


def _fits(node: dict[str, float], share: Share) -> int:
    by_cpu = int(node["CPU"] / share.cpus) if share.cpus else 1 << 30
    if not share.gpus:
        return by_cpu
    gpus = node.get("GPU", 0.0)
    # A fraction of a GPU lies on one GPU; whole ones are taken whole.
    by_gpu = int(gpus) * int(1 / share.gpus) if share.gpus < 1 else int(gpus / share.gpus)
    return min(by_cpu, by_gpu)
