"""The promise: whatever is drafted, batched, reused or preempted, float32 output is the target's own."""

from __future__ import annotations

import itertools

import pytest
import torch

from cluster.decoding.params import METHODS, Method, SamplingParams, Speculation
from cluster.engine import Engine, EngineConfig, Request
from cluster.retrieval import BuildParameters
from tests.corpora import write_corpus
from tests.tiny import CONFIGS, METHODS_ALONE, STOP_ID, VOCABULARY, prompt, tiny_model

NEW = 32
CAPACITIES = (1, 5, 64)
GREEDY = SamplingParams(max_new_tokens=NEW)
SAMPLED = SamplingParams(max_new_tokens=NEW, temperature=0.8, top_p=0.9, seed=7)


def hugging_face(loaded, ids: list[int], **options) -> list[int]:
    mask = torch.ones(1, len(ids))
    options = {"do_sample": False, "max_new_tokens": NEW} | options
    out = loaded.model.generate(torch.tensor([ids]), attention_mask=mask, **options)
    return out[0, len(ids) :].tolist()


@pytest.fixture(scope="module", params=CONFIGS)
def engine(request) -> Engine:
    return Engine(tiny_model(request.param), EngineConfig(kv_cache_gib=0.05, prefix_reuse=False))


@pytest.fixture(scope="module")
def llama() -> Engine:
    return Engine(tiny_model(), EngineConfig(kv_cache_gib=0.05, prefix_reuse=False))


def test_greedy_equals_hugging_face_for_every_method_and_capacity(engine):
    for seed in range(2):
        ids = prompt(20 + 7 * seed, seed)
        expected = hugging_face(engine.loaded, ids)
        for method, capacity in itertools.product(METHODS_ALONE, CAPACITIES):
            (output,) = engine.generate([Request(ids, GREEDY, Speculation(method=method, capacity=capacity))])
            assert output.token_ids == expected, (method, capacity)


def test_speculation_really_happens(llama):
    (output,) = llama.generate([Request(prompt(20), GREEDY, Speculation(method="logitspec", capacity=32))])
    assert output.stats.decode_steps < output.stats.decode_tokens
    assert sum(output.stats.accepted.values()) == output.stats.decode_tokens - output.stats.decode_steps
    assert sum(output.stats.accepted_depths.values()) == sum(output.stats.accepted.values())
    assert sum(output.stats.drafted_depths.values()) == sum(output.stats.drafted.values())


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_batches_equal_single_requests(engine, params):
    prompts = [prompt(3 + 9 * i, i) for i in range(5)]
    alone = [engine.generate([Request(p, params, Speculation(method="vanilla"))])[0].token_ids for p in prompts]
    for method in METHODS_ALONE:
        speculation = Speculation(method=method, capacity=13)
        together = engine.generate([Request(p, params, speculation) for p in prompts])
        assert [o.token_ids for o in together] == alone, method


@pytest.mark.parametrize("method", [m for m in METHODS if m != "vanilla"])
def test_a_corpus_of_ids_that_the_model_has_not_costs_drafts_only(llama, method, tmp_path):
    ids = prompt(9)
    expected = hugging_face(llama.loaded, ids)
    documents = [[*ids, *expected[:n], VOCABULARY, 70_000, *expected[n:]] for n in range(0, NEW, 3)]
    corpus = write_corpus(tmp_path / "corpus", documents, BuildParameters())
    engine = Engine(llama.loaded, EngineConfig(kv_cache_gib=0.05), corpus)
    (output,) = engine.generate([Request(ids, GREEDY, Speculation(method=method, capacity=16))])
    assert output.token_ids == expected


def test_arrivals_between_steps_change_nothing():
    engine = Engine(tiny_model(), EngineConfig(kv_cache_gib=0.05, max_sequences=3, prefill_chunk=5))
    prompts = [prompt(5 + 6 * i, i) for i in range(8)]
    expected = {f"r{i}": hugging_face(engine.loaded, p) for i, p in enumerate(prompts)}
    methods: list[Method] = ["logitspec", "vanilla", "pld", "adaptive"]
    outputs = {}
    for i, ids in enumerate(prompts):
        engine.add(Request(ids, GREEDY, Speculation(method=methods[i % 4], capacity=9), f"r{i}"))
        for _ in range(3 * (i % 3)):
            outputs.update({d.request_id: d.output.token_ids for d in engine.step() if d.output})
    while engine.has_work:
        outputs.update({d.request_id: d.output.token_ids for d in engine.step() if d.output})
    assert outputs == expected


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_preemption_is_invisible(params):
    loaded = tiny_model()
    roomy = Engine(loaded, EngineConfig(kv_cache_gib=0.05, prefix_reuse=False))
    row_bytes = 3 * 2 * 2 * 8 * 4
    tight = Engine(loaded, EngineConfig(kv_cache_gib=260 * row_bytes / 2**30))
    assert tight.kv_rows == 260
    params = params.model_copy(update={"max_new_tokens": 90, "ignore_eos": True})
    requests = [Request(prompt(30 + i, i), params, Speculation(method="logitspec", capacity=8)) for i in range(4)]
    expected = [o.token_ids for o in roomy.generate(requests)]
    outputs = tight.generate(requests)
    assert [o.token_ids for o in outputs] == expected
    assert sum(o.stats.preemptions for o in outputs) > 0


def test_prefix_reuse_is_invisible_and_reuses():
    engine = Engine(tiny_model(), EngineConfig(kv_cache_gib=0.05))
    system = prompt(60, 5)
    history = list(system)
    for turn in range(4):  # a chat: each prompt begins with the whole conversation so far
        history += prompt(10, turn)
        (output,) = engine.generate([Request(history, GREEDY)])
        assert output.token_ids == hugging_face(engine.loaded, history)
        assert output.stats.cached_tokens >= (len(history) - 11 if turn else 0)
        history += output.token_ids
    others = [system + prompt(4, 50 + i) for i in range(4)]  # different questions behind one system prompt
    outputs = engine.generate([Request(p, GREEDY) for p in others])
    assert [o.token_ids for o in outputs] == [hugging_face(engine.loaded, p) for p in others]
    assert all(o.stats.cached_tokens >= len(system) for o in outputs)


def test_seeded_sampling_depends_on_seed_only(llama):
    ids = prompt(20)
    first, again, other = (
        llama.generate([Request(ids, SAMPLED.model_copy(update={"seed": seed}))])[0].token_ids for seed in (7, 7, 8)
    )
    assert first == again != other


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=NEW, repetition_penalty=1.3),
        SamplingParams(max_new_tokens=NEW, presence_penalty=1.0, frequency_penalty=0.5),
        SamplingParams(max_new_tokens=NEW, temperature=1.1, top_k=5, frequency_penalty=0.7, seed=3),
        SamplingParams(max_new_tokens=NEW, logit_bias={4: 3.0, 9: -100.0}),
        SamplingParams(max_new_tokens=NEW, temperature=0.7, min_p=0.1, min_new_tokens=NEW, logprobs=3),
    ],
    ids=["repetition", "presence-frequency", "top-k", "bias", "min-p"],
)
def test_processors_act_as_if_there_were_no_drafts(llama, params):
    ids = prompt(40, 2)
    outputs = [llama.generate([Request(ids, params, Speculation(method=m, capacity=20))])[0] for m in METHODS_ALONE]
    assert all(o.token_ids == outputs[0].token_ids for o in outputs)


def test_repetition_penalty_is_that_of_hugging_face():
    loaded = tiny_model()
    ids = prompt(30)
    expected = hugging_face(loaded, ids, repetition_penalty=1.4)
    params = SamplingParams(max_new_tokens=NEW, repetition_penalty=1.4)
    (output,) = Engine(loaded, EngineConfig(kv_cache_gib=0.05)).generate([Request(ids, params)])
    assert output.token_ids == expected


def test_a_budget_by_step_time_changes_nothing(llama):
    prompts = [prompt(20 + 3 * i, i) for i in range(6)]
    outputs = llama.generate([Request(ids, GREEDY, Speculation()) for ids in prompts])
    assert [o.token_ids for o in outputs] == [hugging_face(llama.loaded, ids) for ids in prompts]


def test_stop_ids_and_limits_inside_a_draft_cut_where_vanilla_does(llama):
    ids = prompt(25, 4)
    free = hugging_face(llama.loaded, ids)
    for at in range(0, len(free), 5):
        params = SamplingParams(max_new_tokens=NEW, stop_token_ids=(free[at],))
        (output,) = llama.generate([Request(ids, params, Speculation(capacity=32))])
        assert output.token_ids == free[: free.index(free[at]) + 1]
        assert output.finish_reason == "stop"
    for limit in range(1, 14):
        (output,) = llama.generate([Request(ids, SamplingParams(max_new_tokens=limit), Speculation(capacity=32))])
        assert output.token_ids == free[:limit]
        assert output.finish_reason == ("stop" if STOP_ID in free[:limit] else "length")


def test_stop_strings_inside_a_draft_cut_where_vanilla_does(llama):
    ids = prompt(25, 4)
    tokenizer = llama.loaded.tokenizer
    free = hugging_face(llama.loaded, ids)
    text = tokenizer.decode(free, skip_special_tokens=True)
    clean = [i for i in range(len(text) - 2) if "�" not in text[i : i + 2]]
    for at in clean[::7]:
        stop = text[at : at + 2]
        params = SamplingParams(max_new_tokens=NEW, stop=stop)
        outputs = [llama.generate([Request(ids, params, Speculation(method=m, capacity=24))])[0] for m in METHODS_ALONE]
        assert {o.text for o in outputs} == {text[: text.index(stop)]}
        assert all(o.token_ids == outputs[0].token_ids for o in outputs)
        assert all(o.finish_reason == "stop" for o in outputs)
        assert all(o.stats.decode_tokens == len(o.token_ids) - 1 for o in outputs)


def test_stop_strings_count_from_the_least_number_of_tokens_on(llama):
    ids = prompt(25, 4)
    text = llama.loaded.tokenizer.decode(hugging_face(llama.loaded, ids), skip_special_tokens=True)
    stop = next(c for c in text if c.isascii() and text.count(c) > 1)
    first = text.index(stop)
    params = [SamplingParams(max_new_tokens=NEW, stop=stop, min_new_tokens=least) for least in (0, first + 1)]
    early, late = (llama.generate([Request(ids, p, Speculation(capacity=24))])[0] for p in params)
    assert early.text == text[:first]
    assert len(late.token_ids) > first + 1 and late.text.startswith(text[: first + 1])


def test_context_limit_ends_a_sequence():
    engine = Engine(tiny_model(), EngineConfig(kv_cache_gib=0.05, max_model_len=64))
    (output,) = engine.generate([Request(prompt(50), SamplingParams(max_new_tokens=200), Speculation(capacity=64))])
    assert len(output.token_ids) == 14
    assert output.finish_reason == "length"


def test_sixteen_bit_divergence_only_at_near_ties():
    loaded = tiny_model(dtype=torch.bfloat16)
    engine = Engine(loaded, EngineConfig(kv_cache_gib=0.05))
    for seed in range(4):
        ids = prompt(30, seed)
        vanilla, drafted = (
            engine.generate([Request(ids, GREEDY, Speculation(method=m, capacity=16))])[0].token_ids
            for m in ("vanilla", "logitspec")
        )
        for at, (a, b) in enumerate(zip(vanilla, drafted, strict=False)):
            if a != b:
                logits = loaded.model(torch.tensor([ids + vanilla[:at]])).logits[0, -1].float()
                assert abs(logits[a] - logits[b]) < 0.05 * logits.abs().max()
                break
