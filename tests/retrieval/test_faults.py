"""Shards lost or slow in mid-generation, on a cluster of several nodes: no token changes, and they are used again."""

from __future__ import annotations

import logging
import os
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import ray
from ray.cluster_utils import Cluster

from cluster.decoding.params import Method, SamplingParams, Speculation
from cluster.engine import Engine, Request
from cluster.retrieval import BuildParameters, actor
from cluster.retrieval.client import ActorCorpus, Reason, RetrievalConfig
from tests.corpora import write_corpus
from tests.retrieval.moody import Moody, slow_file
from tests.tiny import prompt, tiny_model

DEADLINE_MS = 300.0
SHARDS = 3
BACK_WITHIN_S = 30.0  # about 5 on an idle machine
TROUBLE_AT = 10  # steps into a generation
SYSTEM = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
    "metrics_report_interval_ms": 500,
}


@dataclass(frozen=True, slots=True)
class Nodes:
    cluster: Cluster
    doomed: Any


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Ray, connected to a head and another node."""
    ray.shutdown()  # what other tests have left
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": SYSTEM}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    doomed = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield Nodes(cluster, doomed)
    ray.shutdown()
    cluster.shutdown()


class Generation:
    """An engine, with its own answers as the corpus behind actors, and the tokens that it must emit."""

    def __init__(self, directory: Path) -> None:
        params = SamplingParams(max_new_tokens=150)
        loaded = tiny_model(seed=1)
        prompts = [prompt(30, seed) for seed in range(4)]
        vanilla = [Request(p, params, Speculation(method="vanilla")) for p in prompts]
        self.expected = [output.token_ids for output in Engine(loaded).generate(vanilla)]
        documents = [p + answer for p, answer in zip(prompts, self.expected, strict=True)]
        write_corpus(directory, documents, BuildParameters(), SHARDS)
        self.directory = directory
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(actor, "RetrievalActor", Moody)
            self.corpus_id = actor.start_actors(str(directory)).corpus_id
        self.client = ActorCorpus(RetrievalConfig(corpus=str(directory), mode="actors", deadline_ms=DEADLINE_MS))
        self.engine = Engine(loaded, corpus=self.client)
        methods: tuple[Method, ...] = ("rest", "logitspec", "rest", "logitspec")
        self.requests = [
            Request(p, params, Speculation(method=method)) for p, method in zip(prompts, methods, strict=True)
        ]

    def run(self, trouble: Callable[[], object] | None = None) -> Counter[tuple[int, Reason]]:
        """Generate, with trouble in the middle of it; returns the lookups missed, by shard and reason."""
        before = self.client.counts.missed.copy()
        ids = [self.engine.add(request) for request in self.requests]
        outputs: dict[str, list[int]] = {}
        steps = 0
        while len(outputs) < len(ids):
            if steps == TROUBLE_AT and trouble is not None:
                trouble()
            outputs |= {delta.request_id: delta.output.token_ids for delta in self.engine.step() if delta.output}
            steps += 1
        assert [outputs[request_id] for request_id in ids] == self.expected
        assert steps > TROUBLE_AT
        return self.client.counts.missed - before

    def until(self, whole: bool) -> None:
        """Go on generating until all of a generation's lookups are answered, or not all of them."""
        start = time.monotonic()
        while bool(self.run()) is whole:
            assert time.monotonic() - start < BACK_WITHIN_S
        print(f"{'whole again' if whole else 'missed'} after {time.monotonic() - start:.1f} s")

    def holding(self, shard: int) -> actor.Holding:
        handle = actor.find_actor(actor.actor_name(self.corpus_id, shard, 0))
        return cast(actor.Holding, ray.get(handle.holding.remote()))


@pytest.fixture(scope="module")
def generation(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Generation:
    made = Generation(tmp_path_factory.mktemp("corpus"))
    made.until(whole=True)
    assert made.engine.stats.accepted["corpus"] > 100
    return made


def test_an_actor_killed(generation: Generation):
    """The third of three, which may come back on either node: the first two stay spread."""
    pid = generation.holding(2).pid
    missed = generation.run(lambda: os.kill(pid, signal.SIGKILL))
    assert {shard for shard, _ in missed} == {2}
    generation.until(whole=True)
    assert generation.holding(2).pid != pid
    assert generation.client.counts.missed[2, "dead"] > 0


def test_answers_a_second_late(generation: Generation):
    slow = slow_file(generation.directory, 2)
    missed = generation.run(slow.touch)
    assert missed[2, "deadline"] > 0
    assert {shard for shard, _ in missed} == {2}
    slow.unlink()
    generation.until(whole=True)


def test_a_node_killed(generation: Generation, nodes: Nodes):
    """Its actors start on another node."""
    lost = {shard for shard in range(SHARDS) if generation.holding(shard).node_id == nodes.doomed.node_id}
    assert 0 < len(lost) < SHARDS
    nodes.cluster.add_node(num_cpus=1)
    before = generation.client.counts.missed.copy()
    if not generation.run(lambda: nodes.cluster.remove_node(nodes.doomed, allow_graceful=False)):
        generation.until(whole=False)  # its processes live a little longer than the node
    generation.until(whole=True)
    assert {shard for shard, _ in generation.client.counts.missed - before} == lost
    assert nodes.doomed.node_id not in {generation.holding(shard).node_id for shard in range(SHARDS)}


def test_the_metric_shows_it(generation: Generation):
    """As Prometheus reads it from the nodes."""
    deadline = time.monotonic() + BACK_WITHIN_S
    while metric(shard=2, reason="dead") != generation.client.counts.missed[2, "dead"]:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def metric(shard: int, reason: Reason) -> float:
    """The largest value on any node; 0 where none is shown."""
    lines = [line for node in ray.nodes() if node["Alive"] for line in metrics_of(node)]
    mine = (f'shard="{shard}"', f'reason="{reason}"', "logitspec_retrieval_missed")
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if all(part in line for part in mine)]
    return max(values, default=0.0)


def metrics_of(node: dict[str, Any]) -> list[str]:
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(address, timeout=5) as response:
        return [line for line in response.read().decode().splitlines() if not line.startswith("#")]
