"""Sampling with speculation draws from the target's own distribution: 20,000 continuations a method, chi-square."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from cluster.decoding.params import SamplingParams, Speculation
from cluster.engine import Engine, EngineConfig, Request
from tests.tiny import METHODS_ALONE, prompt, tiny_model

DRAWS, LENGTH, TOP_K, TEMPERATURE = 20_000, 3, 3, 1.3
PROMPT = prompt(12, 3) * 2


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny_model(), EngineConfig(kv_cache_gib=0.2, max_sequences=250, max_step_tokens=8192))


@pytest.fixture(scope="module")
def exact(engine) -> dict[tuple[int, ...], float]:
    """Probability of every continuation, by running the model on each of their prefixes."""
    cells: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for cell, mass in cells.items():
            with torch.inference_mode():
                logits = engine.loaded.model(torch.tensor([PROMPT + list(cell)])).logits[0, -1]
            values, ids = torch.topk(logits / TEMPERATURE, TOP_K)
            for token, p in zip(ids.tolist(), torch.softmax(values, 0).tolist(), strict=True):
                longer[(*cell, token)] = mass * p
        cells = longer
    return cells


@pytest.mark.parametrize("method", METHODS_ALONE)
def test_continuations_follow_the_targets_distribution(engine, exact, method):
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    params = [
        SamplingParams(max_new_tokens=LENGTH, temperature=TEMPERATURE, top_k=TOP_K, seed=s, ignore_eos=True)
        for s in range(DRAWS)
    ]
    for at in range(0, DRAWS, 1000):
        requests = [Request(PROMPT, p, Speculation(method=method, capacity=8)) for p in params[at : at + 1000]]
        for output in engine.generate(requests):
            counts[tuple(output.token_ids)] += 1
            accepted += sum(output.stats.accepted.values())
    assert set(counts) <= set(exact)
    statistic = sum((counts[c] - DRAWS * p) ** 2 / (DRAWS * p) for c, p in exact.items())
    assert statistic < 60  # 26 degrees of freedom: exceeded by chance once in 6,000 times
    if method == "logitspec":  # its guesses are among the draws, so that verification has something to accept
        assert accepted > DRAWS / 100
