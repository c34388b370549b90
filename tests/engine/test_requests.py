"""Requests at the boundary: what is refused, what is cancelled, and that the engine goes on."""

from __future__ import annotations

import gc
import weakref

import pytest

from cluster.decoding.params import SamplingParams, Speculation
from cluster.engine import Engine, EngineConfig, Request, RequestError
from tests.tiny import prompt, tiny_model


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny_model(), EngineConfig(kv_cache_gib=0.002))


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (Request([]), "empty"),
        (Request([1] * 512), "context of 512"),
        (Request([1, 2, 259]), "259"),
        (Request([1, -1]), "-1"),
        (Request(["a"]), "token ids"),  # type: ignore[list-item]
        (Request([2**70]), "token ids"),
        (Request([1.5]), "token ids"),  # type: ignore[list-item]
        (Request([True]), "token ids"),
        (Request([[1]]), "one list"),  # type: ignore[list-item]
        (Request([1], prediction=[[1, 2], [3, 4]]), "prediction must be one list"),  # type: ignore[list-item]
        (Request([1], prediction=[2**70]), "prediction must be a list of token ids"),
        (Request([1], prediction=[1.5]), "prediction must be a list of token ids"),  # type: ignore[list-item]
        (Request([1], prediction=[259]), "prediction holds token id 259"),
        (Request([1], SamplingParams(logit_bias={300: 1.0})), "logit_bias"),
        (Request([1], SamplingParams(stop_token_ids=(999,))), "stop_token_ids"),
    ],
)
def test_bad_requests_are_refused_and_the_engine_goes_on(engine, request_, says):
    with pytest.raises(RequestError, match=says):
        engine.generate([Request([1, 2]), request_])
    assert not engine.has_work
    assert engine.load == (0, 0)
    assert len(engine.generate([Request(prompt(5), SamplingParams(max_new_tokens=3))])[0].token_ids) == 3


def test_more_than_the_memory_can_ever_hold_is_refused():
    small = Engine(tiny_model(), EngineConfig(kv_cache_gib=100 * 384 / 2**30))
    with pytest.raises(RequestError, match="kv_cache_gib"):
        small.add(Request(prompt(50), SamplingParams(max_new_tokens=60)))


def test_ids_in_use_are_refused(engine):
    engine.add(Request([1], request_id="same"))
    with pytest.raises(RequestError, match="same"):
        engine.add(Request([1], request_id="same"))
    engine.abort("same")


def test_abort_frees_the_slot_and_reports_what_was_emitted(engine):
    kept = engine.add(Request(prompt(9), SamplingParams(max_new_tokens=12, ignore_eos=True)))
    gone = engine.add(Request(prompt(7), SamplingParams(max_new_tokens=50, ignore_eos=True)))
    for _ in range(3):
        engine.step()
    output = engine.abort(gone)
    assert output is not None and output.finish_reason == "abort"
    assert 0 < len(output.token_ids) < 50
    assert engine.abort(gone) is None
    assert engine.load == (1, 0)
    outputs = []
    while engine.has_work:
        outputs += [d.output for d in engine.step() if d.output]
    assert [(o.request_id, len(o.token_ids)) for o in outputs] == [(kept, 12)]


def test_waiting_requests_can_be_aborted():
    engine = Engine(tiny_model(), EngineConfig(kv_cache_gib=0.002, max_sequences=1))
    first, second = engine.add(Request([1])), engine.add(Request([2]))
    engine.step()
    assert engine.load == (1, 1)
    engine.abort(second)
    engine.abort(first)
    assert engine.load == (0, 0) and not engine.has_work and engine.step() == []


def test_deltas_add_up_to_the_output(engine):
    engine.add(Request(prompt(30), SamplingParams(max_new_tokens=40, logprobs=2), Speculation(capacity=16), "r"))
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    output = deltas[-1].output
    assert output is not None
    assert [t for d in deltas for t in d.token_ids] == output.token_ids
    assert "".join(d.text for d in deltas) == output.text
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
    assert all(next(iter(row)) == t for row, t in zip(output.logprobs, output.token_ids, strict=True))
    assert [row for d in deltas for row in d.logprobs or []] == output.logprobs


def test_long_prompts_do_not_stall_running_sequences():
    engine = Engine(tiny_model(), EngineConfig(kv_cache_gib=0.02, prefill_chunk=16))
    engine.add(
        Request(prompt(5), SamplingParams(max_new_tokens=100, ignore_eos=True), Speculation(method="vanilla"), "a")
    )
    engine.step()
    engine.add(Request(prompt(160), SamplingParams(max_new_tokens=5), request_id="b"))
    before_b = []
    while "b" not in (emitting := [d.request_id for d in engine.step()]):
        before_b.append(emitting)
    assert before_b == [["a"]] * 9  # ten chunks of 16, the stream emitting beside each
    engine.abort("a")
    engine.abort("b")


def test_a_short_prompt_does_not_wait_for_all_of_a_long_one():
    engine = Engine(tiny_model(), EngineConfig(kv_cache_gib=0.02, prefill_chunk=16))
    method = Speculation(method="vanilla")
    engine.add(Request(prompt(5), SamplingParams(max_new_tokens=200, ignore_eos=True), method, "running"))
    engine.step()
    for name, length in (("long", 160), ("longer", 200), ("short", 12)):
        engine.add(Request(prompt(length, len(name)), SamplingParams(max_new_tokens=1), method, name))
    order: list[tuple[str, int]] = []
    while len(order) < 3:
        order += [(d.request_id, engine.stats.steps) for d in engine.step() if d.request_id != "running"]
    assert [name for name, _ in order] == ["short", "long", "longer"]
    assert order[0][1] <= 4 and order[1][1] <= 24  # the long one had half of each step at least
    engine.abort("running")


def test_engines_may_follow_one_another_on_a_model():
    loaded = tiny_model()
    request = Request(prompt(20), SamplingParams(max_new_tokens=20))
    first, second = (Engine(loaded, EngineConfig(kv_cache_gib=0.01)).generate([request])[0] for _ in range(2))
    assert first.token_ids == second.token_ids


def test_memory_goes_with_its_engine():
    loaded = tiny_model()
    engine = Engine(loaded, EngineConfig(kv_cache_gib=0.01))
    engine.generate([Request(prompt(9), SamplingParams(max_new_tokens=3))])
    pool = weakref.ref(engine._pool)
    gc.disable()  # by itself, not when a collection happens to come
    try:
        del engine
        assert pool() is None
    finally:
        gc.enable()


def test_given_ids_and_own_ids_do_not_collide(engine):
    given = engine.add(Request([1], request_id="request-0"))
    own = Engine.add(engine, Request([1]))
    assert given != own
    for request_id in (given, own):
        engine.abort(request_id)


def test_a_vanishing_nucleus_is_the_best_token():
    engine = Engine(tiny_model(), EngineConfig(kv_cache_gib=0.01))
    greedy = engine.generate([Request(prompt(9), SamplingParams(max_new_tokens=9))])[0].token_ids
    tiny = SamplingParams(max_new_tokens=9, temperature=1.0, top_p=1e-50)
    assert engine.generate([Request(prompt(9), tiny)])[0].token_ids == greedy
