"""Asking a corpus over its actors: one question a shard a step, a deadline, no harm from shards that are down."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import time
import weakref
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import ray
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from ray.exceptions import RayError
from ray.util import metrics

from cluster.ray_connection import ClusterError, connect
from cluster.retrieval.actor import Holding, actor_name, find_actor, running_actors
from cluster.retrieval.corpus import Corpus, check_tokenizer
from cluster.retrieval.errors import CorpusError
from cluster.retrieval.hashing import shards_of_queries
from cluster.retrieval.link import Link
from cluster.retrieval.lookup import CorpusLookup, LookupResult, merge
from cluster.retrieval.manifest import Manifest
from cluster.retrieval.server import ANSWERED, Connection
from cluster.retrieval.shard_file import Shard, map_shard
from cluster.retrieval.storage import Location, read_manifest
from cluster.retrieval.wire import pack_request, unpack_result

Mode = Literal["local", "actors", "auto"]
Reason = Literal["deadline", "dead", "error", "suspended"]

_CONNECT_S = 2.0


class RetrievalConfig(BaseModel):
    """How the engine reaches its corpus."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    corpus: str = Field(description="directory or URI of the corpus; in modes actors and auto also its id")
    mode: Mode = Field(
        "local",
        description="local: map the files in this process. actors: ask the actors. auto: map the files of "
        "actors on this node, ask the others",
    )
    deadline_ms: float = Field(25.0, gt=0, description="most a step waits for its actors, from the question on")
    connect_timeout_s: float = Field(30.0, gt=0, description="most that opening waits for an actor")


@dataclass(slots=True)
class CallCounts:
    """What became of a client's questions."""

    answered: int = 0
    missed: Counter[tuple[int, Reason]] = field(default_factory=Counter)  # by shard and reason


def open_corpus(config: RetrievalConfig, tokenizer_fingerprint: str) -> CorpusLookup:
    """The corpus as `config` says, ready to answer; modes actors and auto join the running Ray cluster.

    Raises CorpusError: no such corpus, another tokenizer, no cluster, no actors.
    """
    if config.mode == "local":
        corpus = Corpus.open(config.corpus, tokenizer_fingerprint=tokenizer_fingerprint)
        corpus.warm_up()
        return corpus
    if not ray.is_initialized():
        _join_cluster(config.corpus)
    client = ActorCorpus(config)
    check_tokenizer(client.manifest, tokenizer_fingerprint, config.corpus)
    return client


def _join_cluster(corpus: str) -> None:
    """Connect to the cluster at $RAY_ADDRESS, or to the one that runs on this machine."""
    try:
        connect(os.environ.get("RAY_ADDRESS", "auto"))
    except ClusterError as error:
        raise CorpusError(
            f"no Ray cluster to ask actors on: {error}; start one with ray start --head and the actors with "
            f"python -m corpus_builder serve {corpus}"
        ) from error


class ActorCorpus:
    """A corpus held by actors; it is a `CorpusLookup`. For one thread at a time.

    Attributes:
        manifest: the corpus' manifest.
        counts: questions answered and missed.
        mapped: shards that are read in place.
    """

    def __init__(self, config: RetrievalConfig) -> None:
        self.manifest = _find_manifest(config)
        self.counts = CallCounts()
        self.mapped: tuple[int, ...] = ()
        self._deadline_s = config.deadline_ms / 1e3
        self._numbers = itertools.count(1)
        self._local: Corpus | None = None
        names = _names_by_shard(self.manifest, config)
        holdings = _holdings([name for found in names for name in found], config.connect_timeout_s)
        here = ray.get_runtime_context().get_node_id()
        if config.mode == "auto":
            self._map(names, holdings, here)
        self._links = [
            [] if shard in self.mapped else [_link(shard, name, holdings.get(name)) for name in found]
            for shard, found in enumerate(_nearest_first(names, holdings, here))
        ]
        weakref.finalize(self, _close, self._links)  # or their threads would seek actors forever
        self._missed = metrics.Counter(
            "logitspec_retrieval_missed",
            "lookups of a shard that a decode step went on without",
            ("corpus", "shard", "reason"),
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """n-gram sizes of the corpus, rising."""
        return self.manifest.parameters.sizes

    def lookup(
        self, queries: NDArray[np.int32], lengths: NDArray[np.int32], max_nodes: int | NDArray[np.int32] = 64
    ) -> LookupResult:
        """See `CorpusLookup.lookup`."""
        return self.submit(queries, lengths, max_nodes).collect()

    def submit(
        self, queries: NDArray[np.int32], lengths: NDArray[np.int32], max_nodes: int | NDArray[np.int32] = 64
    ) -> _Pending:
        """See `CorpusLookup.submit`."""
        now = time.monotonic()
        pending = _Pending(self, len(queries), now, now + self._deadline_s)
        limits = np.full(len(queries), max_nodes, np.int32) if isinstance(max_nodes, int) else max_nodes
        owners = shards_of_queries(queries, lengths, self.sizes[0], len(self.manifest.shards))
        owners[limits <= 0] = -1
        for shard, links in enumerate(self._links):
            if not links:
                continue
            numbers = np.flatnonzero(owners == shard)
            if len(numbers):
                request = pack_request(queries[numbers], lengths[numbers], limits[numbers])
                self._ask(pending, shard, numbers, request, now)
        if self._local is not None:
            everyone = np.arange(len(queries))
            pending.parts.append((everyone, self._local.lookup(queries, lengths, limits)))
        return pending

    def close(self) -> None:
        """Hang up on all actors."""
        _close(self._links)

    def _ask(self, pending: _Pending, shard: int, queries: NDArray[np.int64], request: bytes, now: float) -> None:
        """Ask the first of the shard's actors that is free."""
        reason: Reason = "suspended"
        for link in self._links[shard]:
            if link.free(now):
                number = next(self._numbers)
                if link.ask(number, request):
                    pending.calls.append(_Call(link, number, queries))
                    return
                reason = "dead"
            elif not link.connected:
                reason = "dead"
        self.miss(shard, reason)

    def miss(self, shard: int, reason: Reason) -> None:
        """Count a shard's missing answer."""
        self.counts.missed[shard, reason] += 1
        tags = {"corpus": self.manifest.corpus_id, "shard": str(shard), "reason": reason}
        self._missed.inc(1, tags)

    def _map(self, names: list[list[str]], holdings: dict[str, Holding], here: str) -> None:
        """Map the shards that an actor on this node holds, from the files it has mapped."""
        shards: dict[int, Shard] = {}
        for shard, found in enumerate(names):
            for name in found:
                if name in holdings and holdings[name].node_id == here:
                    with contextlib.suppress(CorpusError):  # a container of the node with other files
                        shards[shard] = map_shard(Path(holdings[name].path), shard)
        if shards:
            self.mapped = tuple(sorted(shards))
            self._local = Corpus(self.manifest, shards)
            self._local.warm_up()


@dataclass(frozen=True, slots=True)
class _Call:
    """A question on its way, for the queries with these numbers."""

    link: Link
    number: int
    queries: NDArray[np.int64]


class _Pending:
    """A step's questions; it is a `PendingLookup`."""

    def __init__(self, client: ActorCorpus, queries: int, since: float, deadline: float) -> None:
        self.calls: list[_Call] = []
        self.parts: list[tuple[NDArray[np.int64], LookupResult]] = []
        self._client = client
        self._queries = queries
        self._since = since
        self._deadline = deadline

    def collect(self) -> LookupResult:
        """The answers that came in time, as one result."""
        waiting = self._take(self.calls)
        while waiting:
            left = self._deadline - time.monotonic()
            poll = select.poll()
            links = {call.link.fileno(): call.link for call in waiting}
            for fileno in links:
                poll.register(fileno, select.POLLIN)
            come = poll.poll(max(0.0, left * 1e3))
            for fileno, _ in come:
                links[fileno].receive()
            waiting = self._take(waiting)
            if not come and left <= 0:
                self._give_up(waiting)
                break
        if len(self.parts) == 1 and len(self.parts[0][0]) == self._queries:
            return self.parts[0][1]
        return merge(self._queries, self.parts)

    def _take(self, calls: list[_Call]) -> list[_Call]:
        """Take the answers that are there; returns the calls still to be waited for."""
        waiting = []
        for call in calls:
            message = call.link.take(call.number)
            if message is not None:
                self._finish(call, message[1], message[2])
            elif call.link.lost(call.number):
                self._client.miss(call.link.shard, "dead")
            else:
                waiting.append(call)
        return waiting

    def _finish(self, call: _Call, status: int, content: bytes) -> None:
        if status != ANSWERED:  # the lookup itself failed, such as when the shard's file is gone
            call.link.rest(time.monotonic())
            self._client.miss(call.link.shard, "error")
            return
        call.link.well()
        self._client.counts.answered += 1
        self.parts.append((call.queries, unpack_result(content)))

    def _give_up(self, calls: list[_Call]) -> None:
        for call in calls:
            call.link.give_up(call.number, self._since)
            call.link.rest(time.monotonic())
            self._client.miss(call.link.shard, "deadline")


def _find_manifest(config: RetrievalConfig) -> Manifest:
    """The manifest from the directory, or from the first actor where `corpus` is a corpus id."""
    handle = find_actor(actor_name(config.corpus, 0, 0))
    if handle is None:
        return read_manifest(Location.parse(config.corpus))
    try:
        text = str(ray.get(handle.manifest.remote(), timeout=config.connect_timeout_s))
    except RayError as error:
        raise CorpusError(f"the actors of corpus {config.corpus} do not answer: {error}") from error
    return Manifest.parse(text, f"the manifest of corpus {config.corpus}")


def _names_by_shard(manifest: Manifest, config: RetrievalConfig) -> list[list[str]]:
    """Names of the running actors of each shard. Raises CorpusError when a shard has none."""
    names: list[list[str]] = [[] for _ in manifest.shards]
    for name in running_actors(manifest.corpus_id):
        names[int(name.split(":")[2])].append(name)
    for shard, found in enumerate(names):
        if not found:
            raise CorpusError(
                f"no actor holds shard {shard} of corpus {manifest.corpus_id}; start the actors with "
                f"python -m corpus_builder serve {config.corpus}"
            )
    return names


def _holdings(names: list[str], timeout_s: float) -> dict[str, Holding]:
    """What the actors say of themselves; those that do not answer in time are left out."""
    handles = {name: find_actor(name) for name in names}
    asked = {handle.holding.remote(): name for name, handle in handles.items() if handle is not None}
    if not asked:
        return {}
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
    found = {}
    for ref in ready:
        with contextlib.suppress(RayError):
            found[asked[ref]] = ray.get(ref)
    return found


def _nearest_first(names: list[list[str]], holdings: dict[str, Holding], here: str) -> list[list[str]]:
    """Each shard's actors, those on this node before the others."""
    return [sorted(found, key=lambda n: n not in holdings or holdings[n].node_id != here) for found in names]


def _link(shard: int, name: str, holding: Holding | None) -> Link:
    """A link to an actor, connected if it can be now."""

    def connect() -> Connection | None:
        if not ray.is_initialized():  # shut down meanwhile; asking would start a cluster
            return None
        return _connect(_holdings([name], _CONNECT_S).get(name))

    link = Link(shard, connect)
    link.attach(_connect(holding))
    return link


def _close(links: list[list[Link]]) -> None:
    for link in itertools.chain.from_iterable(links):
        link.close()


def _connect(holding: Holding | None) -> Connection | None:
    if holding is None:
        return None
    try:
        return Connection(holding.address, holding.secret, _CONNECT_S)
    except OSError:
        return None
