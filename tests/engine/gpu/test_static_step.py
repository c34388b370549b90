"""Steps in few shapes: the same promise as for any others, when nothing but what was recorded is done again."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch
from transformers import LlamaConfig

from cluster.decoding.params import SamplingParams, Speculation
from cluster.engine import Engine, EngineConfig, Request, gpu
from cluster.engine.gpu import StaticStep
from tests import tiny
from tests.engine.gpu.recording import record
from tests.engine.test_exactness import GREEDY, SAMPLED, hugging_face
from tests.tiny import CONFIGS, METHODS_ALONE, prompt, tiny_model

PLAIN = EngineConfig(kv_cache_gib=0.05, optimize=False)  # what kernels do would not be recorded


@pytest.fixture(autouse=True)
def _recording(monkeypatch):
    monkeypatch.setattr(gpu, "capture_for", lambda device: record)


def make(loaded=None, **options) -> Engine:
    """An engine with static shapes, whose memory holds nothing usable at first."""
    engine = Engine(loaded or tiny_model(), EngineConfig(static_shapes=True, **({"kv_cache_gib": 0.05} | options)))
    for layer in range(len(engine._target.shapes)):
        for whole in engine._pool.pools(layer):
            whole.fill_(torch.nan)
    return engine


def static_of(engine: Engine) -> StaticStep:
    (way,) = engine._target._ways
    assert isinstance(way, StaticStep)
    return way


@pytest.mark.parametrize("architecture", CONFIGS)
def test_greedy_equals_hugging_face_for_every_method(architecture):
    engine = make(tiny_model(architecture), prefix_reuse=False)
    ids = prompt(27, 1)
    expected = hugging_face(engine.loaded, ids)
    for method, capacity in itertools.product(METHODS_ALONE, (5, 64)):
        (output,) = engine.generate([Request(ids, GREEDY, Speculation(method=method, capacity=capacity))])
        assert output.token_ids == expected, (method, capacity)
    assert static_of(engine).shapes


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_batches_equal_what_other_engines_give(architecture, params):
    loaded = tiny_model(architecture)
    prompts = [prompt(3 + 9 * i, i) for i in range(5)]
    plain = Engine(loaded, PLAIN)
    expected = [plain.generate([Request(p, params, Speculation(method="vanilla"))])[0].token_ids for p in prompts]
    engine = make(loaded)
    for method in METHODS_ALONE:
        speculation = Speculation(method=method, capacity=13)
        outputs = engine.generate([Request(p, params, speculation) for p in prompts])
        assert [o.token_ids for o in outputs] == expected, method


def test_arrivals_chunks_and_preemption_are_invisible():
    row_bytes = 3 * 2 * 2 * 8 * 4
    engine = make(kv_cache_gib=260 * row_bytes / 2**30, prefill_chunk=5, max_step_tokens=16)
    params = SamplingParams(max_new_tokens=90, ignore_eos=True)
    prompts = [prompt(30 + i, i) for i in range(4)]
    plain = Engine(engine.loaded, PLAIN)
    expected = {f"r{i}": plain.generate([Request(p, params)])[0].token_ids for i, p in enumerate(prompts)}
    outputs = {}
    for i, ids in enumerate(prompts):
        engine.add(Request(ids, params, Speculation(method=METHODS_ALONE[i % 4], capacity=8), f"r{i}"))
        for _ in range(3):
            outputs.update({d.request_id: d.output for d in engine.step() if d.output})
    while engine.has_work:
        outputs.update({d.request_id: d.output for d in engine.step() if d.output})
    assert {name: o.token_ids for name, o in outputs.items()} == expected
    assert sum(o.stats.preemptions for o in outputs.values()) > 0


def test_prefix_reuse_and_long_chunks_are_invisible():
    engine = make()
    history = prompt(200, 5)  # wider than what is recorded
    for turn in range(3):
        history += prompt(10, turn)
        (output,) = engine.generate([Request(history, GREEDY)])
        assert output.token_ids == hugging_face(engine.loaded, history)
        assert output.stats.cached_tokens >= (len(history) - 11 if turn else 0)
        history += output.token_ids


def test_prompts_are_scored_as_elsewhere():
    loaded = tiny_model()
    request = Request(prompt(30), SamplingParams(max_new_tokens=4, prompt_logprobs=2, logprobs=2))
    expected, found = (
        engine.generate([request])[0] for engine in (Engine(loaded, PLAIN), make(loaded, max_step_tokens=12))
    )
    assert found.token_ids == expected.token_ids
    for name in ("prompt_logprobs", "logprobs"):
        for a, b in zip(getattr(found, name), getattr(expected, name), strict=True):
            assert a == (b and pytest.approx(b, abs=1e-4))


def test_recordings_are_few_and_bounded():
    engine = make(max_graphs=3)
    ids = prompt(20)
    for method in METHODS_ALONE:
        (output,) = engine.generate([Request(ids, GREEDY, Speculation(method=method, capacity=24))])
        assert output.token_ids == hugging_face(engine.loaded, ids)
        assert 1 <= len(static_of(engine).shapes) <= 3


def test_a_model_that_looks_at_values_runs_unrecorded(monkeypatch, caplog):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    monkeypatch.setitem(CONFIGS, "dynamic", LlamaConfig(**tiny._SHAPE, rope_parameters=rope))
    engine = make(tiny_model("dynamic"))
    ids = prompt(20)
    assert engine.generate([Request(ids, GREEDY)])[0].token_ids == hugging_face(engine.loaded, ids)
    assert static_of(engine).shapes == []
    assert "without being recorded" in caplog.text


def test_memory_goes_with_its_engine(monkeypatch):
    engine = make()
    engine.generate([Request(prompt(9), SamplingParams(max_new_tokens=3))])
    pool = weakref.ref(engine._pool)
    gc.disable()
    try:
        del engine
        assert pool() is None
    finally:
        gc.enable()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("architecture", CONFIGS)
def test_graphs_on_a_gpu_equal_plain_decoding(monkeypatch, architecture):
    monkeypatch.undo()  # real graphs
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    loaded = tiny.on_device(tiny_model(architecture), "cuda")
    prompts = [prompt(3 + 9 * i, i) for i in range(5)]
    plain = Engine(loaded, EngineConfig(kv_cache_gib=0.05, static_shapes=False))
    expected = [plain.generate([Request(p, GREEDY, Speculation(method="vanilla"))])[0].token_ids for p in prompts]
    engine = Engine(loaded, EngineConfig(kv_cache_gib=0.05))
    for method in METHODS_ALONE:
        outputs = engine.generate([Request(p, GREEDY, Speculation(method=method, capacity=13)) for p in prompts])
        assert [o.token_ids for o in outputs] == expected, method
    assert static_of(engine).shapes
