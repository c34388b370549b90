"""The engine's side of drafting: who is asked for drafts, and when."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from cluster.decoding.drafting import Draft, DraftContext, Drafter
from cluster.decoding.logitspec import LogitSpec
from cluster.decoding.params import SamplingParams, Speculation
from cluster.decoding.tree import CONTEXT, TreeBuilder
from cluster.engine import Engine, EngineConfig, Request
from cluster.engine.step_times import StepTimes
from cluster.retrieval.lookup import CorpusLookup, LookupResult, PendingLookup
from tests.tiny import prompt, tiny_model

NEW = 40


class Recording(CorpusLookup):
    """A corpus that knows nothing and notes what happens in which order."""

    sizes = (1, 2, 3)

    def __init__(self) -> None:
        self.events: list[str] = []

    def lookup(self, queries, lengths, max_nodes) -> LookupResult:
        return self.submit(queries, lengths, max_nodes).collect()

    def submit(self, queries, lengths, max_nodes) -> PendingLookup:
        self.events.append("asked")
        return _Answer(self, LookupResult.empty(len(queries)))


@dataclass
class _Answer:
    corpus: Recording
    result: LookupResult

    def collect(self) -> LookupResult:
        self.corpus.events.append("fetched")
        return self.result


class Dull(Drafter):
    """Drafts one token from its ``begin``-th call on, nothing before; notes the lengths of what it is asked for."""

    def __init__(self, begin: int) -> None:
        self.calls: list[int] = []
        self._begin = begin

    def guesses_wanted(self, capacity: int) -> int:
        return 4

    def propose(self, contexts: Sequence[DraftContext], costs=None) -> list[Draft]:
        self.calls += [len(c.index) for c in contexts]
        builder = TreeBuilder(2)
        builder.reset(int(contexts[0].index.tokens[-1]))
        if len(self.calls) > self._begin:
            assert len(contexts[0].guesses)
            builder.add_path(contexts[0].guesses[:1], CONTEXT)
        return [Draft(builder.build(), retrieved=False)]


def asked(begin: int, speculation: Speculation) -> list[int]:
    """Tokens after the prompt when the drafter was asked."""
    drafter = Dull(begin)
    engine = Engine(tiny_model(), drafters={"adaptive": drafter})
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    engine.generate([Request(prompt(20), params, speculation)])
    return [length - 20 for length in drafter.calls]


def test_a_method_that_finds_nothing_worthwhile_is_asked_now_and_then():
    assert asked(NEW, Speculation(method="adaptive")) == [1, 2, 3, *range(4, 32, 4), *range(32, NEW, 8)]


def test_it_is_asked_at_every_step_again_once_something_pays():
    calls = asked(5, Speculation(method="adaptive"))
    assert calls[:6] == [1, 2, 3, 4, 8, 12]
    assert max(b - a for a, b in itertools.pairwise(calls[5:])) <= 2


@pytest.mark.parametrize("capacity", [2])
def test_a_method_with_a_fixed_tree_is_always_asked(capacity):
    assert asked(NEW, Speculation(method="adaptive", capacity=capacity)) == [*range(1, NEW)]


@pytest.mark.parametrize("method", ["rest", "logitspec", "adaptive"])
def test_the_corpus_is_asked_at_the_end_of_a_step_for_the_next_one(method):
    corpus = Recording()
    engine = Engine(tiny_model(), corpus=corpus)
    speculation = Speculation(method=method, capacity=4)
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    for seed in range(3):
        engine.add(Request(prompt(20, seed), params, speculation))
    engine.step()
    while engine.has_work:
        assert corpus.events[-1] == "asked"
        before = len(corpus.events)
        engine.step()
        assert corpus.events[before:][:1] == ["fetched"]
    steps = engine.stats.steps
    assert corpus.events.count("asked") == corpus.events.count("fetched") <= steps + 2  # the batch shrinks twice


def drafted(engine: Engine, count: int) -> int:
    """Draft tokens while so many sequences of a method without a capacity run."""
    before = sum(engine.stats.drafted.values())
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    engine.generate([Request(prompt(20, seed), params, Speculation(method="logitspec")) for seed in range(count)])
    return sum(engine.stats.drafted.values()) - before


def test_trees_fit_what_a_step_costs(monkeypatch):
    def flat_until_eight(times: StepTimes, rows: int, most: int, context: int, sequences: int = 1):
        return np.maximum(rows + np.arange(most + 1.0), 8.0)

    monkeypatch.setattr(StepTimes, "of_drafting", flat_until_eight)
    engine = Engine(tiny_model())
    alone = drafted(engine, 1)
    assert alone > NEW  # several a step
    assert drafted(engine, 8) == 0  # eight roots fill what costs nothing


def test_answers_that_never_draft_teach_nothing_about_drafts(monkeypatch):
    monkeypatch.setattr(StepTimes, "of_drafting", lambda self, rows, most, *_: np.ones(most + 1))
    engine = Engine(tiny_model())
    short, long = (SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (1, NEW))
    speculation = Speculation(method="pld")
    repetitive = prompt(20) * 3
    for _ in range(100):
        engine.generate([Request(repetitive, short, speculation)])
    (after,) = engine.generate([Request(repetitive, long, speculation)])
    assert sum(after.stats.drafted.values())


def test_a_tree_is_never_filled_with_guesses_for_an_earlier_token(monkeypatch):
    """Sizes of trees that jump between none and all, and next-next guesses beside each other."""
    costs = itertools.cycle([np.ones(8), np.arange(1.0, 9.0), np.arange(1.0, 9.0)])
    monkeypatch.setattr(StepTimes, "of_drafting", lambda *_: next(costs))
    seen: list[tuple[int, int]] = []

    class Watching(LogitSpec):
        def propose(self, contexts, costs=None):
            seen.extend((len(c.index), len(c.guesses)) for c in contexts)
            return super().propose(contexts, costs)

    engine = Engine(tiny_model(), drafters={"logitspec": Watching()})
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    engine.generate([Request(prompt(20), params, Speculation(method="logitspec"))])
    assert seen and all(guesses == 0 for _, guesses in seen)


@pytest.mark.parametrize("method", ["logitspec", "adaptive"])
def test_prompts_in_a_step_do_not_make_drafts_cheap(monkeypatch, method):
    """Where every token takes as long as a step, none is worth drafting, however long a prompt makes a step."""

    def linear(times: StepTimes, rows: int, most: int, context: int, sequences: int = 1):
        return rows + np.arange(most + 1.0)

    monkeypatch.setattr(StepTimes, "of_drafting", linear)
    engine = Engine(tiny_model(), EngineConfig(prefill_chunk=16))
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    engine.add(Request(prompt(20) * 2, params, Speculation(method=method)))
    engine.step()
    engine.add(Request(prompt(300), params, Speculation(method=method)))
    while engine.has_work:
        engine.step()
    assert sum(engine.stats.drafted.values()) == 0
