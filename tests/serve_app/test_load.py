"""An application with a corpus in retrieval actors: under load of all kinds of clients, and while an actor dies."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from typing import Any

import httpx
import pytest
import ray
from ray import serve

from cluster.decoding.params import METHODS
from cluster.models import load_tokenizer, tokenizer_fingerprint
from cluster.retrieval import BuildParameters
from cluster.retrieval.actor import actor_name, find_actor, start_actors
from cluster.retrieval.storage import Location, read_manifest
from eval_jobs import load_probe
from eval_jobs.load_client import LoadClient, Outcome
from tests.corpora import write_corpus
from tests.serve_app.deployment import deploy, free_port, metric, private_ray, wait_until

REQUESTS, AT_ONCE = 200, 32
INVALID: list[dict[str, Any]] = [{"temperature": 9}, {"max_tokens": 5000}, {"model": "none"}, {"messages": []}]


@pytest.fixture(scope="module")
def corpus(tiny_model, tmp_path_factory) -> str:
    """A corpus of text like the prompts, in three shards, with the model's tokenizer."""
    directory = tmp_path_factory.mktemp("corpus")
    tokenizer = load_tokenizer(str(tiny_model))
    documents = [tokenizer(prompt(i) * 3).input_ids for i in range(20)]
    write_corpus(directory, documents, BuildParameters(), shards=3)
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["tokenizer"]["fingerprint"] = tokenizer_fingerprint(tokenizer)
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return str(directory)


@pytest.fixture(scope="module")
def url(tiny_model, corpus):
    port = free_port()
    with private_ray():
        start_actors(corpus)
        serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
        deploy(
            model=str(tiny_model),
            dtype="float32",
            device="cpu",
            kv_cache_gib=0.02,
            max_sequences=24,
            corpus=corpus,
            retrieval="actors",
        )
        yield f"http://127.0.0.1:{port}"


def prompt(i: int) -> str:
    return f"{i} " + "hello there, " * random.Random(i).randint(1, 20)


async def leave(client: httpx.AsyncClient, url: str, i: int) -> None:
    """Ask for more than is waited for, and go after a few events."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": prompt(i)}], "ignore_eos": True, "stream": True}
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        events = 0
        async for line in response.aiter_lines():
            events += line.startswith("data:")
            if events > i % 7:
                return


async def storm(url: str) -> dict[int, tuple[str, Outcome | None]]:
    """What each client got; every eighth leaves, every eighth is invalid."""
    outcomes: dict[int, tuple[str, Outcome | None]] = {}
    waiting = iter(range(REQUESTS))
    fields = {"model": "tiny", "ignore_eos": True, "seed": 7, "temperature": 1}

    async def worker(client: LoadClient, leaving: httpx.AsyncClient) -> None:
        for i in waiting:
            if i % 8 == 3:
                await leave(leaving, url, i)
                outcomes[i] = ("left", None)
            elif i % 8 == 6:
                outcomes[i] = ("invalid", await client.ask(prompt(i), **INVALID[i // 8 % len(INVALID)]))
            else:
                method = {"method": METHODS[i % len(METHODS)]}
                outcomes[i] = ("valid", await client.ask(prompt(i), max_tokens=length(i), speculation=method))

    async with (
        LoadClient(f"{url}/v1", 120, None, fields) as client,
        httpx.AsyncClient(timeout=120) as leaving,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(AT_ONCE):
            group.create_task(worker(client, leaving))
    return outcomes


def length(i: int) -> int:
    return 1 + 7 * (i % 9)


async def alone(url: str, numbers: list[int]) -> list[str]:
    """The same answers, one after the other, without drafts."""
    fields = {"model": "tiny", "ignore_eos": True, "seed": 7, "temperature": 1, "speculation": {"method": "vanilla"}}
    async with LoadClient(f"{url}/v1", 120, None, fields) as client:
        return [(await client.ask(prompt(i), max_tokens=length(i))).text for i in numbers]


async def streams(url: str, method: str, kill: int | None = None) -> list[Outcome]:
    """Four long answers at once; in the middle of them the process ``kill`` is killed."""
    fields = {"model": "tiny", "ignore_eos": True, "temperature": 0, "max_tokens": 250}
    async with LoadClient(f"{url}/v1", 120, None, fields | {"speculation": {"method": method}}) as client:
        tasks = [asyncio.create_task(client.ask(prompt(i))) for i in range(4)]
        if kill is not None:
            await asyncio.sleep(0.3)
            assert not any(task.done() for task in tasks)
            os.kill(kill, signal.SIGKILL)
        return list(await asyncio.gather(*tasks))


def test_every_valid_request_is_answered_in_full_and_no_slot_is_lost(url):
    outcomes = asyncio.run(storm(url))
    assert len(outcomes) == REQUESTS
    for i, (kind, outcome) in outcomes.items():
        if kind == "valid":
            assert outcome is not None and (outcome.error, outcome.tokens) == (None, length(i))
        elif kind == "invalid":
            assert outcome is not None and outcome.error in ("http 400", "http 404")
    wait_until(lambda: metric("ray_logitspec_running") + metric("ray_logitspec_waiting") == 0)
    wait_until(lambda: metric("ray_logitspec_requests", finish_reason="abort") > 0)
    valid = [i for i, (kind, _) in outcomes.items() if kind == "valid"][::6]
    expected = asyncio.run(alone(url, valid))
    assert [outcome.text for _, outcome in (outcomes[i] for i in valid) if outcome is not None] == expected


def test_a_killed_retrieval_actor_costs_drafts_and_not_answers(url, corpus):
    expected = [outcome.text for outcome in asyncio.run(streams(url, "vanilla"))]
    corpus_id = read_manifest(Location.parse(corpus)).corpus_id
    pid = ray.get(find_actor(actor_name(corpus_id, 1, 0)).holding.remote()).pid
    outcomes = asyncio.run(streams(url, "rest", kill=pid))
    assert [(outcome.error, outcome.text) for outcome in outcomes] == [(None, text) for text in expected]
    wait_until(lambda: metric("ray_logitspec_retrieval_missed", shard="1") > 0)
    assert metric("ray_logitspec_retrieval_seconds_count", model="tiny") > 0


def test_the_probe_measures_latencies(url, monkeypatch):
    for name, value in {"_FIRST_S": 0.1, "_STREAM_TOKENS": 200, "_LONG_WORDS": 40, "_HISTORY_WORDS": 20}.items():
        monkeypatch.setattr(load_probe, name, value)

    async def steps() -> tuple[dict[str, Any], dict[str, Any]]:
        async with LoadClient(f"{url}/v1", 120, None, {"model": "tiny", "temperature": 0}) as client:
            return await load_probe.stall(client), await load_probe.second_turn(client)

    stalled, second = asyncio.run(steps())
    assert stalled["prompt_tokens"] > 200
    assert second["second_ttft_s"] > 0 and second["prompt_tokens"] > 100
