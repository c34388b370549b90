"""The engine's side of drafting: who is asked for drafts, and when."""

import itertools
from collections.abc import Sequence

import pytest

from cluster.decoding.drafting import Draft, DraftContext, Drafter
from cluster.decoding.params import SamplingParams, Speculation
from cluster.decoding.tree import CONTEXT, TreeBuilder
from cluster.engine import Engine, Request
from tests.tiny import prompt, tiny_model

NEW = 40


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
    assert asked(NEW, Speculation(method="adaptive")) == [1, 2, 3, *range(4, NEW, 4)]


def test_it_is_asked_at_every_step_again_once_something_pays():
    calls = asked(5, Speculation(method="adaptive"))
    assert calls[:6] == [1, 2, 3, 4, 8, 12]
    assert max(b - a for a, b in itertools.pairwise(calls[5:])) <= 2


@pytest.mark.parametrize("capacity", [2])
def test_a_method_with_a_fixed_tree_is_always_asked(capacity):
    assert asked(NEW, Speculation(method="adaptive", capacity=capacity)) == [*range(1, NEW)]
