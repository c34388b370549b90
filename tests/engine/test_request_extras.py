"""Prompt log-probabilities, predictions and constraints, with speculation and without."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cluster.decoding.params import SamplingParams, Speculation
from cluster.engine import Engine, EngineConfig, Request, RequestError
from tests.tiny import METHODS_ALONE, prompt, tiny_model

SPECULATIONS = [Speculation(method=method, capacity=8) for method in METHODS_ALONE]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny_model(), EngineConfig(kv_cache_gib=0.002, max_step_tokens=16, prefill_chunk=4))


class Allowed:
    """Allows token ids by a cycle of sets: position i takes one of ``sets[i % len(sets)]``."""

    def __init__(self, *sets: set[int]) -> None:
        self.sets = sets
        self.position = 0

    def mask(self, row):
        keep = sorted(self.sets[self.position % len(self.sets)])
        values = row[keep].clone()
        row[:] = -torch.inf
        row[keep] = values

    def observe(self, token):
        assert token in self.sets[self.position % len(self.sets)]
        self.position += 1

    def valid_length(self, path):
        wrong = (i for i, token in enumerate(path) if token not in self.sets[(self.position + i) % len(self.sets)])
        return next(wrong, len(path))

    def forced(self):
        forced: list[int] = []
        for i in range(len(self.sets)):
            allowed = self.sets[(self.position + i) % len(self.sets)]
            if len(allowed) > 1:
                break
            forced += allowed
        return forced


@pytest.mark.parametrize("length", [1, 2, 5, 16, 17, 40])
def test_prompt_logprobs_are_those_of_the_model(engine, length):
    ids = prompt(length)
    params = SamplingParams(max_new_tokens=3, prompt_logprobs=2, ignore_eos=True)
    engine.generate([Request(ids, SamplingParams(max_new_tokens=2))])  # leaves a prefix that must not be reused
    other = Request(prompt(9), SamplingParams(max_new_tokens=20, ignore_eos=True))
    output, _ = engine.generate([Request(ids, params), other])
    with torch.inference_mode():
        logits = engine.loaded.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == length
    assert output.prompt_logprobs[0] is None
    for i, row in enumerate(output.prompt_logprobs[1:], 1):
        assert row is not None
        assert next(iter(row)) == ids[i]
        assert row[ids[i]] == pytest.approx(float(logits[i - 1, ids[i]]), abs=1e-4)
        assert max(row.values()) == pytest.approx(float(logits[i - 1].max()), abs=1e-4)


def test_prompt_logprobs_come_with_the_first_delta_and_only_if_asked_for(engine):
    engine.add(Request(prompt(12), SamplingParams(max_new_tokens=4, prompt_logprobs=0, ignore_eos=True)))
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    assert len(deltas[0].prompt_logprobs or []) == 12
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])
    plain = engine.generate([Request(prompt(12), SamplingParams(max_new_tokens=2))])[0]
    assert plain.prompt_logprobs is None


def test_scores_survive_preemption():
    rows = 110
    small = Engine(tiny_model(), EngineConfig(kv_cache_gib=rows * 384 / 2**30, max_step_tokens=8, prefill_chunk=8))
    params = SamplingParams(max_new_tokens=60, prompt_logprobs=0, ignore_eos=True)
    speculation = Speculation(method="vanilla", capacity=1)
    outputs = small.generate([Request(prompt(6), params, speculation), Request(prompt(7), params, speculation)])
    assert sum(output.stats.preemptions for output in outputs) > 0
    assert [len(output.prompt_logprobs or []) for output in outputs] == [6, 7]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("speculation", SPECULATIONS, ids=lambda s: s.method)
def test_a_prediction_changes_the_speed_and_not_the_tokens(engine, speculation, temperature):
    params = SamplingParams(max_new_tokens=40, temperature=temperature, seed=3, ignore_eos=True)
    plain = engine.generate([Request(prompt(10), params, speculation)])[0]
    for prediction in (plain.token_ids, [*plain.token_ids[:20], 7, 7, *plain.token_ids[22:]], [5] * 30):
        output = engine.generate([Request(prompt(10), params, speculation, prediction=prediction)])[0]
        assert output.token_ids == plain.token_ids
    told = engine.generate([Request(prompt(10), params, speculation, prediction=plain.token_ids)])[0]
    if speculation.method == "vanilla":
        assert "prediction" not in told.stats.drafted
    else:
        assert told.stats.decode_steps <= 6  # 39 tokens, up to 8 a step
        assert told.stats.accepted["prediction"] > 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constraint_holds_and_the_method_does_not_matter(engine, temperature):
    sets = ({10, 11, 12}, {20}, {30}, {40, 41})
    params = SamplingParams(max_new_tokens=30, temperature=temperature, seed=5, ignore_eos=True)
    outputs = [
        engine.generate([Request(prompt(8), params, speculation, constraint=Allowed(*sets))])[0]
        for speculation in SPECULATIONS
    ]
    assert all(token in sets[i % 4] for i, token in enumerate(outputs[0].token_ids))
    assert all(output.token_ids == outputs[0].token_ids for output in outputs)
    spec = outputs[-1].stats
    assert spec.decode_steps < outputs[0].stats.decode_steps
    assert spec.accepted["grammar"] > 0


def test_bad_predictions_are_refused(engine):
    with pytest.raises(RequestError, match="prediction"):
        engine.add(Request([1], prediction=[10**6]))


def test_predictions_may_be_longer_than_the_answer(engine):
    request = Request(prompt(5), SamplingParams(max_new_tokens=3), prediction=np.arange(20).tolist())
    assert engine.generate([request])[0].token_ids
