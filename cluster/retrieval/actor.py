"""Retrieval actors: one named Ray actor holds each shard of a corpus (docs/corpus.md §4)."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.retrieval.corpus import Corpus
from cluster.retrieval.errors import CorpusError
from cluster.retrieval.manifest import Manifest
from cluster.retrieval.server import LookupServer
from cluster.retrieval.storage import Location, local_file, read_manifest
from cluster.retrieval.wire import pack_result, unpack_request

NAMESPACE = "logitspec"
_PREFIX = "logitspec"


def actor_name(corpus_id: str, shard: int, replica: int) -> str:
    """The name an actor has in `NAMESPACE`."""
    return f"{_PREFIX}:{corpus_id}:{shard}:{replica}"


@dataclass(frozen=True, slots=True)
class Holding:
    """Where an actor runs, the local file it has mapped there, and how to ask it (`server`)."""

    node_id: str
    path: str
    pid: int
    address: tuple[str, int]
    secret: bytes


class RetrievalActor:
    """Maps one shard and answers lookups on a socket of its own.

    The shard is mapped at the first use, so a restart with the file out of reach makes answers fail and does not
    end the actor: it answers as soon as the file is back.
    """

    def __init__(self, directory: str, corpus_id: str, shard: int) -> None:
        self._directory = directory
        self._corpus_id = corpus_id
        self._shard = shard
        self._corpus: Corpus | None = None
        # Ray starts workers at low priority. A lookup takes microseconds, and a decode step waits for it.
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        self._server = LookupServer(ray.util.get_node_ip_address(), self.answer)

    def answer(self, request: bytes) -> bytes:
        """Answer a packed request about this shard's queries; called by the server's thread."""
        queries, lengths, limits = unpack_request(request)
        return pack_result(self._mapped().lookup(queries, lengths, limits))

    def manifest(self) -> str:
        """The corpus' manifest as JSON."""
        return self._mapped().manifest.to_json()

    def holding(self) -> Holding:
        """Where the shard is held."""
        location = Location.parse(self._directory)
        manifest = self._mapped().manifest
        path = local_file(location, manifest.shards[self._shard], manifest.corpus_id)
        node_id = ray.get_runtime_context().get_node_id()
        return Holding(node_id, str(path), os.getpid(), self._server.address, self._server.secret)

    def _mapped(self) -> Corpus:
        if self._corpus is None:
            corpus = Corpus.open(self._directory, shards=[self._shard])
            if corpus.manifest.corpus_id != self._corpus_id:
                raise CorpusError(
                    f"{self._directory} now holds corpus {corpus.manifest.corpus_id}, not {self._corpus_id}; "
                    "stop the old corpus' actors and start new ones"
                )
            corpus.warm_up()
            self._corpus = corpus
        return self._corpus


def start_actors(directory: str, *, replicas: int = 1, timeout_s: float = 120.0) -> Manifest:
    """Start the actors of all shards that do not run yet, and wait until all of them answer.

    They outlive this process, restart without limit, and are spread over the nodes. `directory` must be
    reachable from every node. Raises CorpusError.
    """
    manifest = read_manifest(Location.parse(directory))
    if "://" not in directory:
        directory = os.path.abspath(os.path.expanduser(directory))
    actor_class: Any = ray.remote(RetrievalActor)
    handles: dict[str, Any] = {}
    nodes = _nodes()
    for shard in range(len(manifest.shards)):
        for replica in range(replicas):
            name = actor_name(manifest.corpus_id, shard, replica)
            handles[name] = actor_class.options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                memory=1,  # a byte: Ray places actors that reserve nothing at random, whatever the strategy
                max_restarts=-1,
                max_task_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[len(handles) % len(nodes)], soft=True),
            ).remote(directory, manifest.corpus_id, shard)
    for name, handle in handles.items():
        try:
            ray.get(handle.holding.remote(), timeout=timeout_s)
        except ray.exceptions.RayTaskError as error:
            raise CorpusError(f"actor {name} cannot hold its shard: {error.cause}") from error
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            raise CorpusError(f"actor {name} did not start: {error}") from error
    return manifest


def _nodes() -> list[str]:
    """Ids of the nodes to spread actors over: all that take work."""
    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: str(node["NodeID"]))
    working = [node for node in alive if node["Resources"].get("CPU", 0) > 0]
    return [node["NodeID"] for node in working or alive]


def stop_actors(corpus_id: str) -> int:
    """End all actors of a corpus for good; returns how many there were."""
    names = running_actors(corpus_id)
    for name in names:
        handle = find_actor(name)
        if handle is not None:
            ray.kill(handle, no_restart=True)
    return len(names)


def running_actors(corpus_id: str) -> list[str]:
    """Names of the actors of a corpus, sorted."""
    actors: list[dict[str, Any]] = ray.util.list_named_actors(all_namespaces=True)
    prefix = f"{_PREFIX}:{corpus_id}:"
    return sorted(a["name"] for a in actors if a["namespace"] == NAMESPACE and a["name"].startswith(prefix))


def find_actor(name: str) -> Any:
    """A handle to an actor by its name, None where there is no such actor."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
