"""Replay: what a method would have drafted on the way through recorded answers, and what of it would have come true."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.decoding.drafting import Draft, DraftContext, Drafter, Verified
from cluster.decoding.evidence import heat_of
from cluster.decoding.fitting import Fitting
from cluster.decoding.ngram_index import NgramIndex
from cluster.decoding.tree import single_node
from cluster.decoding.verification import follow
from cluster.retrieval import Corpus
from eval_jobs.rejections import Rejections
from eval_jobs.rows import Trace, TraceKey
from eval_jobs.simulation.step_times import StepCurve


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of it.

    Attributes:
        tokens: emitted by decode steps (a prefill emits one more for each answer).
        steps: decode steps.
        seconds: their time by the curve.
        vanilla_seconds: the time of as many steps of width 1 as there are tokens.
        drafted: nodes of all trees, roots left out.
    """

    tokens: int
    steps: int
    seconds: float
    vanilla_seconds: float
    drafted: int

    @property
    def mean_accepted_tokens(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def speedup(self) -> float:
        """Of decoding over vanilla, by the curve; the time of drafting is not in it."""
        return self.vanilla_seconds / self.seconds if self.seconds else 1.0


@dataclass(frozen=True, slots=True)
class Recorded:
    """A trace as arrays.

    Attributes:
        prompt, output: int32, ids.
        best, gaps: [N, K], the best ids for each output token and their logits' distances from the best one.
        beside: what is known off the output.
    """

    prompt: NDArray[np.int32]
    output: NDArray[np.int32]
    best: NDArray[np.int32]
    gaps: NDArray[np.float32]
    beside: Rejections

    @staticmethod
    def of(trace: Trace) -> Recorded:
        output = np.array(trace.output_ids, np.int32)
        best = np.array(trace.top_ids, np.int32).reshape(len(output), -1)
        logits = np.array(trace.top_logits, np.float32).reshape(best.shape)
        beside = Rejections(trace.rejected_parents, trace.rejected_tokens, trace.rejected_ids, trace.rejected_gaps)
        return Recorded(np.array(trace.prompt_ids, np.int32), output, best, logits[:, :1] - logits, beside)


def vocabulary(traces: Sequence[Trace], corpus: Corpus | None) -> int:
    """One more than the largest token id that replaying these answers may meet."""
    lists = ((t.prompt_ids, t.output_ids, t.top_ids, t.rejected_tokens, t.rejected_ids) for t in traces)
    largest = max(max(ids, default=0) for every in lists for ids in every)
    return max(1 + largest, 0 if corpus is None else corpus.manifest.vocabulary)


def replay(
    drafter: Drafter,
    traces: Iterable[Trace],
    capacity: int,
    max_new_tokens: int,
    curve: StepCurve,
    told: Mapping[TraceKey, StepCurve] | None,
    temperature: float = 0.0,
    fitting: Fitting | None = None,
) -> Replay:
    """Replay all answers through one drafter, one after the other, as an engine of one sequence would run them.

    Args:
        drafter: the method; it keeps what it learns from answer to answer.
        traces: answers with their logits.
        capacity: most nodes of a tree.
        max_new_tokens: the limit that the answers were given under.
        curve: how long steps take.
        told: by trace, how long steps take, as the method hears it while it drafts for that answer; the curve says it
            of others. None if it hears nothing.
        temperature: at which the answers were drawn.
        fitting: chooses how much of the capacity is used, step by step; None uses all.
    """
    sizes = np.arange(1, capacity + 1, dtype=np.float64)
    heat = heat_of(temperature)
    widths: list[int] = []
    tokens = 0
    for trace in traces:
        recorded = Recorded.of(trace)
        costs = None if told is None else told.get(trace.key, curve)(sizes)
        widths += _replay_one(drafter, recorded, capacity, max_new_tokens, costs, heat, fitting)
        tokens += len(recorded.output) - 1
    times = curve(np.array(widths, np.float64))
    one = float(curve(np.ones(1))[0])
    return Replay(tokens, len(widths), float(times.sum()), tokens * one, sum(widths) - len(widths))


def _replay_one(
    drafter: Drafter,
    recorded: Recorded,
    capacity: int,
    max_new_tokens: int,
    costs: NDArray[np.float64] | None,
    heat: int,
    fitting: Fitting | None,
) -> list[int]:
    """The width of every decode step of one answer."""
    index = NgramIndex(recorded.prompt, room=len(recorded.output))
    root_only = Draft(single_node(int(recorded.prompt[-1])), retrieved=False)
    _observe(drafter, index, root_only, np.zeros(1, np.int64), recorded, 0)
    index.extend(recorded.output[:1])
    position = 1
    widths = []
    while position < len(recorded.output):
        others = recorded.best[position - 1] != recorded.output[position - 1]
        size = capacity if fitting is None or costs is None else fitting.choose(costs)
        wanted = drafter.guesses_wanted(size)
        guesses, gaps = (a[position - 1][others][:wanted] for a in (recorded.best, recorded.gaps))
        context = DraftContext(index, size, max_new_tokens - position - 1, guesses, gaps, heat=heat)
        (draft,) = drafter.propose([context], costs)
        nodes = _walk(draft, recorded.output[position:])
        _observe(drafter, index, draft, nodes, recorded, position)
        if fitting is not None:
            fitting.observe(len(nodes) - 1)
        index.extend(recorded.output[position : position + len(nodes)])
        position += len(nodes)
        widths.append(len(draft.tree))
    return widths


def _walk(draft: Draft, coming: NDArray[np.int32]) -> NDArray[np.int64]:
    """Nodes that verification would visit, one for each token it would emit."""
    tree = draft.tree
    choices = np.full(len(tree), -1, np.int32)
    choices[tree.depths < len(coming)] = coming[tree.depths[tree.depths < len(coming)]]
    return follow(tree.tokens, tree.parents, choices)[: len(coming)]


def _observe(
    drafter: Drafter,
    index: NgramIndex,
    draft: Draft,
    nodes: NDArray[np.int64],
    recorded: Recorded,
    position: int,
) -> None:
    """Tell the method what came true, and what the target thought at the nodes, as far as that was recorded."""
    count = drafter.ranks_observed
    if not count:
        return
    ranked = recorded.beside.ranked(draft.tree, nodes, position, count)
    on_path = slice(position, position + len(nodes))
    ranked.ids[nodes], ranked.gaps[nodes] = recorded.best[on_path, :count], recorded.gaps[on_path, :count]
    before = int(index.tokens[-2]) if len(index) > 1 else -1
    drafter.observe([Verified(draft, before, nodes, recorded.output[on_path], ranked)])
