"""``python -m eval_jobs exactness``: whatever the method and whatever happens around it, the tokens are the same.

Every prompt is answered by Hugging Face ``generate`` and by vanilla steps alone; then by each method alone, in a batch
with random arrivals, behind a reused prefix, and under memory so short that sequences are preempted.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

from cluster.cli.options import add_capacity_option, add_corpus_options, add_model_options, model_config, open_corpus
from cluster.decoding.params import CORPUS_METHODS, METHODS, Method, SamplingParams, Speculation
from cluster.engine import Engine, EngineConfig, Request, RequestOutput
from cluster.models import LoadedModel, load_model, render_chat
from cluster.retrieval import CorpusLookup
from eval_jobs.options import add_length_option, add_prompt_options, chosen_prompts
from eval_jobs.systems import HuggingFaceSystem

Prompts = Sequence[Sequence[int]]
_SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 20}


def add_parser(subcommands: Any) -> None:
    """Declare the command and its options."""
    parser = subcommands.add_parser("exactness", help="check that outputs never change", description=__doc__)
    add_model_options(parser)
    add_capacity_option(parser)
    add_corpus_options(parser)
    add_prompt_options(parser)
    add_length_option(parser)
    parser.add_argument("--batch", type=int, default=8, metavar="B", help="sequences at once (default: %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run all checks; the last line is one JSON object: for each check, prompts whose tokens are identical."""
    texts = chosen_prompts(args)
    reference = HuggingFaceSystem(load_model(model_config(args)))
    loaded = load_model(model_config(args))
    prompts = [render_chat(loaded.tokenizer, [{"role": "user", "content": text}]) for text in texts]
    greedy = SamplingParams(max_new_tokens=args.max_new_tokens)
    sampled = greedy.model_copy(update=_SAMPLED)
    corpus = open_corpus(args, loaded)
    checker = Checker(loaded, prompts, args.capacity, args.batch, corpus)
    methods = [m for m in METHODS if corpus is not None or m not in CORPUS_METHODS]

    expected = [reference.generate(p, greedy).token_ids for p in prompts]
    drawn = checker.alone("vanilla", sampled)
    identical: dict[str, int] = {}
    ways: dict[str, Callable[[Method, SamplingParams], list[list[int]]]] = {
        "alone": checker.alone,
        "batched": checker.batched,
        "reused": checker.behind_a_reused_prefix,
        "preempted": checker.preempted,
    }
    print("greedy answers beside generate's, sampled ones beside those of vanilla steps alone:", file=sys.stderr)
    for way, generate in ways.items():
        for method in methods:
            for kind, params, wanted in (("greedy", greedy, expected), ("sampled", sampled, drawn)):
                preemptions = checker.preemptions
                same = sum(a == b for a, b in zip(generate(method, params), wanted, strict=True))
                identical[f"{way}/{kind}/{method}"] = same
                idle = way == "preempted" and checker.preemptions == preemptions
                note = ", but none had to be preempted: give more prompts or tokens" if idle else ""
                print(f"{way:<10} {kind:<8} {method:<10} {same}/{len(prompts)} identical{note}", file=sys.stderr)
    if not checker.preemptions:
        identical = {name: same for name, same in identical.items() if not name.startswith("preempted")}
    print(json.dumps({"prompts": len(prompts), "preemptions": checker.preemptions, "identical": identical}))


class Checker:
    """Answers the same prompts in different circumstances."""

    def __init__(
        self, loaded: LoadedModel, prompts: Prompts, capacity: int | None, batch: int, corpus: CorpusLookup | None
    ) -> None:
        self._loaded = loaded
        self._prompts = prompts
        self._capacity = capacity
        self._batch = batch
        self._corpus = corpus
        self._roomy = self._engine(EngineConfig(max_sequences=batch, prefix_reuse=False))
        self.preemptions = 0

    def alone(self, method: Method, params: SamplingParams) -> list[list[int]]:
        """One at a time."""
        return [self._roomy.generate([self._request(p, method, params)])[0].token_ids for p in self._prompts]

    def batched(self, method: Method, params: SamplingParams) -> list[list[int]]:
        """Arriving at random moments, up to ``batch`` running at once."""
        return [o.token_ids for o in self._arriving(self._roomy, method, params)]

    def behind_a_reused_prefix(self, method: Method, params: SamplingParams) -> list[list[int]]:
        """Twice in a row with prefix reuse on: the second time all but the last prompt token is there."""
        engine = self._engine(EngineConfig(max_sequences=self._batch))
        outputs = []
        for prompt in self._prompts:
            request = self._request(prompt, method, params)
            engine.generate([request])
            outputs += engine.generate([request])
        assert all(o.stats.cached_tokens for o in outputs)
        return [o.token_ids for o in outputs]

    def preempted(self, method: Method, params: SamplingParams) -> list[list[int]]:
        """Two of about one length at a time, with memory for one and half the answer of the other."""
        capacity = self._roomy.capacity(Speculation(method=method, capacity=self._capacity))
        by_length = sorted(range(len(self._prompts)), key=lambda i: len(self._prompts[i]))
        answers: dict[int, list[int]] = {}
        for pair in (by_length[i : i + 2] for i in range(0, len(by_length), 2)):
            lengths = [len(self._prompts[i]) + capacity for i in pair]
            rows = max(lengths) + params.max_new_tokens + min(lengths) + params.max_new_tokens // 2
            gib = self._roomy.config.kv_cache_gib * rows / self._roomy.kv_rows
            engine = self._engine(EngineConfig(max_sequences=2, kv_cache_gib=gib))
            outputs = engine.generate([self._request(self._prompts[i], method, params) for i in pair])
            self.preemptions += sum(o.stats.preemptions for o in outputs)
            answers |= {i: o.token_ids for i, o in zip(pair, outputs, strict=True)}
        return [answers[i] for i in range(len(self._prompts))]

    def _engine(self, config: EngineConfig) -> Engine:
        return Engine(self._loaded, config, self._corpus)

    def _request(self, prompt: Sequence[int], method: Method, params: SamplingParams) -> Request:
        return Request(prompt, params, Speculation(method=method, capacity=self._capacity))

    def _arriving(self, engine: Engine, method: Method, params: SamplingParams) -> list[RequestOutput]:
        chance = random.Random(0)
        outputs: dict[str, RequestOutput] = {}
        order = []
        for prompt in self._prompts:
            order.append(engine.add(self._request(prompt, method, params)))
            for _ in range(chance.randrange(6)):
                outputs.update({d.request_id: d.output for d in engine.step() if d.output is not None})
        while engine.has_work:
            outputs.update({d.request_id: d.output for d in engine.step() if d.output is not None})
        return [outputs[request_id] for request_id in order]
