"""Actors and their client: the same answers as in place, and no harm when shards are slow, dead or on another node."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import ray
from numpy.typing import NDArray

from cluster.retrieval import BuildParameters, Corpus, CorpusError, LookupResult, as_queries
from cluster.retrieval.actor import (
    NAMESPACE,
    RetrievalActor,
    actor_name,
    find_actor,
    running_actors,
    start_actors,
    stop_actors,
)
from cluster.retrieval.client import ActorCorpus, RetrievalConfig, open_corpus
from tests.corpora import write_corpus

SHARDS = 3
BACK_WITHIN_S = 10.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(0)
    documents = [random.integers(0, 200, 300).tolist() for _ in range(10)]
    path = tmp_path_factory.mktemp("corpus")
    write_corpus(path, documents, BuildParameters(), shards=SHARDS)
    return path


@pytest.fixture
def actors(ray_cluster: None, directory: Path) -> str:
    """The id of the corpus, whose actors run: those of the test before, where it left them."""
    return start_actors(str(directory)).corpus_id


def some_queries() -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    random = np.random.default_rng(1)
    queries = random.integers(0, 210, (120, 4)).astype(np.int32)
    return queries, random.integers(0, 5, 120).astype(np.int32)


def same(a: LookupResult, b: LookupResult) -> bool:
    names = ("matched", "totals", "offsets", "tokens", "parents", "counts")
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)


def client_of(directory: Path, **options: object) -> ActorCorpus:
    return ActorCorpus(RetrievalConfig.model_validate({"corpus": str(directory), "mode": "actors", **options}))


def seconds_until(condition: Callable[[], bool]) -> float:
    """How long it takes until the condition holds; fails after twice the time allowed for coming back."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < 2 * BACK_WITHIN_S
        time.sleep(0.02)
    return time.monotonic() - start


def pids_of(corpus_id: str) -> list[int]:
    return [ray.get(find_actor(name).holding.remote()).pid for name in running_actors(corpus_id)]


def test_starting_again_starts_nothing(ray_cluster: None, tmp_path: Path):
    write_corpus(tmp_path, [[1, 2, 3, 4, 5]], BuildParameters(), shards=2)
    corpus_id = start_actors(str(tmp_path)).corpus_id
    pids = pids_of(corpus_id)
    assert len(set(pids)) == 2
    start_actors(str(tmp_path))
    assert pids_of(corpus_id) == pids
    start_actors(str(tmp_path), replicas=2)
    assert len(pids_of(corpus_id)) == 4
    assert stop_actors(corpus_id) == 4
    seconds_until(lambda: running_actors(corpus_id) == [])


@pytest.mark.parametrize("mode", ["actors", "auto"])
def test_answers_are_those_of_the_files(actors: str, directory: Path, mode: str):
    queries, lengths = some_queries()
    limits = np.random.default_rng(2).integers(0, 9, len(queries)).astype(np.int32)
    client = client_of(directory, mode=mode, deadline_ms=10_000)
    assert client.mapped == (tuple(range(SHARDS)) if mode == "auto" else ())
    assert same(client.lookup(queries, lengths, limits), Corpus.open(directory).lookup(queries, lengths, limits))
    assert client.counts.answered == (0 if mode == "auto" else SHARDS)
    assert not client.counts.missed
    by_id = client_of(directory, corpus=actors, deadline_ms=10_000)
    assert same(by_id.lookup(queries, lengths, limits), client.lookup(queries, lengths, limits))


def test_lookups_can_be_on_their_way_together(actors: str, directory: Path):
    queries, lengths = some_queries()
    client, corpus = client_of(directory, deadline_ms=10_000), Corpus.open(directory)
    first, second = client.submit(queries, lengths, 3), client.submit(queries[::-1].copy(), lengths[::-1].copy(), 5)
    assert same(second.collect(), corpus.lookup(queries[::-1].copy(), lengths[::-1].copy(), 5))
    assert same(first.collect(), corpus.lookup(queries, lengths, 3))


def test_a_killed_actor_costs_its_drafts_and_comes_back(actors: str, directory: Path):
    queries, lengths = some_queries()
    whole = Corpus.open(directory).lookup(queries, lengths, 8)
    others = Corpus.open(directory, shards=[0, 2]).lookup(queries, lengths, 8)
    client = client_of(directory, deadline_ms=2000)
    assert same(client.lookup(queries, lengths, 8), whole)
    os.kill(ray.get(find_actor(actor_name(actors, 1, 0)).holding.remote()).pid, signal.SIGKILL)
    seconds_until(lambda: not same(client.lookup(queries, lengths, 8), whole))
    assert {shard for shard, _ in client.counts.missed} == {1}
    answers = []

    def whole_again() -> bool:
        answers.append(client.lookup(queries, lengths, 8))
        return same(answers[-1], whole)

    assert seconds_until(whole_again) < BACK_WITHIN_S
    assert all(same(answer, others) for answer in answers[:-1])


def test_a_replica_takes_over(ray_cluster: None, tmp_path: Path):
    write_corpus(tmp_path, [[1, 2, 3, 4, 5, 6]], BuildParameters())
    corpus_id = start_actors(str(tmp_path), replicas=2).corpus_id
    client = client_of(tmp_path, deadline_ms=2000)
    first = running_actors(corpus_id)[0]
    ray.kill(find_actor(first), no_restart=True)
    contexts = as_queries([[2, 3]], 4)
    answers = [client.lookup(*contexts, 2).tokens.tolist() for _ in range(50)]
    assert answers.count([]) <= 1  # the one that found the first actor gone
    assert answers[-1] == [4, 5]
    seconds_until(lambda: find_actor(first) is None)
    stop_actors(corpus_id)


class Sleeper(RetrievalActor):
    """Takes a while for every answer."""

    def answer(self, request: bytes) -> bytes:
        time.sleep(0.5)
        return super().answer(request)


def test_a_slow_actor_does_not_hold_the_others_up(actors: str, directory: Path):
    """Steps wait for the deadline at most, few calls pile up, and the late answers are not taken for later steps'."""
    name = actor_name(actors, 0, 0)
    ray.kill(find_actor(name), no_restart=True)
    seconds_until(lambda: find_actor(name) is None)
    options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
    ray.remote(Sleeper).options(**options).remote(str(directory), actors, 0)
    queries, lengths = some_queries()
    client = client_of(directory, deadline_ms=150)
    others = Corpus.open(directory, shards=[1, 2])
    steps = 40
    as_expected = 0
    for step in range(steps):
        asked = np.roll(queries, step, 0), np.roll(lengths, step)
        as_expected += same(client.lookup(*asked, 8), others.lookup(*asked, 8))
    missed = client.counts.missed
    assert missed[0, "deadline"] + missed[0, "suspended"] == steps
    assert missed[0, "suspended"] > missed[0, "deadline"] > 0
    assert as_expected >= steps - sum(count for (shard, _), count in missed.items() if shard > 0)
    assert client._links[0][0].unanswered <= 2
    ray.kill(find_actor(name), no_restart=True)
    seconds_until(lambda: find_actor(name) is None)


def test_a_corpus_replaced_under_its_actors_is_an_error_not_an_answer(
    ray_cluster: None, tmp_path: Path, directory: Path
):
    path = tmp_path / "corpus"
    write_corpus(path, [[1, 2, 3, 4]], BuildParameters())
    corpus_id = start_actors(str(path)).corpus_id
    client = client_of(path, deadline_ms=2000)
    name = actor_name(corpus_id, 0, 0)
    pid = ray.get(find_actor(name).holding.remote()).pid
    write_corpus(path, [[1, 2, 9, 9]], BuildParameters())
    os.kill(pid, signal.SIGKILL)
    contexts = as_queries([[1, 2]], 4)

    def gone() -> bool:
        assert client.lookup(*contexts, 4).tokens.tolist() in ([], [3, 4])
        return client.counts.missed[0, "dead"] > 0

    seconds_until(gone)
    for _ in range(20):
        assert client.lookup(*contexts, 4).tokens.tolist() == []
        time.sleep(0.1)
    client.close()
    stop_actors(corpus_id)


def test_what_cannot_be_opened_says_why(ray_cluster: None, tmp_path: Path):
    write_corpus(tmp_path / "alone", [[3, 2, 1]], BuildParameters())
    with pytest.raises(CorpusError, match=r"no actor holds shard 0.*python -m corpus_builder serve"):
        client_of(tmp_path / "alone")
    with pytest.raises(CorpusError, match="is not a directory"):
        start_actors(str(tmp_path / "nowhere"))
    broken = tmp_path / "broken"
    write_corpus(broken, [[1, 2, 3]], BuildParameters())
    shard = broken / "shard-00000.arrow"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(CorpusError, match=r"cannot hold its shard: .*shard-00000\.arrow has"):
        start_actors(str(broken))


@pytest.mark.parametrize("mode", ["local", "actors"])
def test_opening_checks_the_tokenizer(actors: str, directory: Path, mode: str):
    config = RetrievalConfig.model_validate({"corpus": str(directory), "mode": mode})
    assert open_corpus(config, "none").sizes == (1, 2, 3, 4)
    with pytest.raises(CorpusError, match="sha256:other"):
        open_corpus(config, "sha256:other")
