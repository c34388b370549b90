"""The engine's side of drafting: which method drafts for which sequence, within what budget, and what it learns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.decoding.adaptive import LARGEST_TREE
from cluster.decoding.constraint import prune
from cluster.decoding.drafting import Draft, DraftContext, Drafter, Verified
from cluster.decoding.evidence import heat_of
from cluster.decoding.fitting import Fitting
from cluster.decoding.methods import CPU_CAPACITY, GPU_CAPACITY, make_drafter
from cluster.decoding.params import Method, Speculation
from cluster.decoding.ranking import Ranked, Ranking
from cluster.decoding.tree import GRAMMAR, PREDICTION, TreeBuilder, single_node
from cluster.decoding.verification import Walk
from cluster.engine.scheduler import Work
from cluster.engine.sequence import Sequence as EngineSequence
from cluster.engine.step_times import StepTimes
from cluster.retrieval.lookup import CorpusLookup

_MOST_GUESSES = 16  # next-next guesses where a method drafts what pays: further down none is likely enough
_PATIENCE = 4  # steps in a row for which no draft paid; after them only every fourth looks for one,
_RESIGNED = 32  # and after so many every eighth


class DraftStage:
    """Drafts for a step's sequences.

    Args:
        vocabulary: number of the model's token ids.
        on_gpu: whether the target model runs on one.
        times: predicts how long steps take.
        corpus: what methods may draft from beside the context.
        drafters: drafters for these methods instead of new ones.
    """

    def __init__(
        self,
        vocabulary: int,
        on_gpu: bool,
        times: StepTimes,
        corpus: CorpusLookup | None,
        drafters: Mapping[Method, Drafter],
    ) -> None:
        self._vocabulary = vocabulary
        self._default_capacity = GPU_CAPACITY if on_gpu else CPU_CAPACITY
        self._times = times
        self._corpus = corpus
        self._memories = {"": dict(drafters)}
        self._fittings: dict[str, dict[Method, Fitting]] = {}
        self.use_memory("")

    def use_memory(self, name: str) -> None:
        """Go on with the drafters of this name, and with what they have learned; new ones at first."""
        self._drafters = self._memories.setdefault(name, {})
        self._fitting = self._fittings.setdefault(name, defaultdict(Fitting))

    def drafter(self, method: Method) -> Drafter:
        """The drafter that all requests of a method share.

        Raises:
            MissingCorpus: the method needs a corpus, and there is none.
        """
        if method not in self._drafters:
            self._drafters[method] = make_drafter(method, self._vocabulary, self._corpus)
        return self._drafters[method]

    def capacity(self, speculation: Speculation) -> int:
        """Most nodes of the request's trees, the root counted."""
        if speculation.method == "vanilla":
            return 1
        if speculation.capacity is not None:
            return speculation.capacity
        return LARGEST_TREE if speculation.is_budgeted else self._default_capacity

    def propose(self, works: Sequence[Work], rows: int) -> list[Draft]:
        """A tree for each ready sequence; a first token is chosen without drafts.

        Args:
            works: the step's ready sequences.
            rows: tokens that the step computes if it drafts none.
        """
        drafts = [_root_alone(w.sequence) for w in works]
        looking = [i for i, w in enumerate(works) if w.sequence.sampling.position and _looks(w.sequence)]
        for work in works:
            work.sequence.fruitless += 1
        context_rows = sum(len(w.sequence.index) for w in works)
        for group in _by_method([works[i].sequence for i in looking]).values():
            members = [looking[i] for i in group]
            beside = rows + sum(len(d.tree) - 1 for d in drafts)
            proposed = self._drafts([works[i].sequence for i in members], beside, context_rows, len(works))
            for i, draft in zip(members, proposed, strict=True):
                drafts[i] = _refined(draft, works[i].sequence)
                if len(drafts[i].tree) > 1:
                    works[i].sequence.fruitless = 0
        return drafts

    def ranks_observed(self, ready: Sequence[EngineSequence]) -> int:
        """How many of the best tokens at each node are wanted in this step; 1 or more."""
        return max((self.drafter(s.speculation.method).ranks_observed for s in ready), default=0) or 1

    def deepest_rank(self, ready: Sequence[EngineSequence]) -> int:
        """How far down logits will be ranked in this step, for what is observed and for next-next guesses."""
        wanted = [1 + self._guesses_wanted(s) for s in ready]
        return max(self.ranks_observed(ready), *wanted, 1)

    def observe(
        self, ready: Sequence[EngineSequence], drafts: Sequence[Draft], walks: Sequence[Walk], ranked: Ranked
    ) -> None:
        """Let the methods learn from a verified step; before the sequences are extended by what it emitted."""
        groups: dict[Method, list[Verified]] = {}
        at = 0
        for sequence, draft, walk in zip(ready, drafts, walks, strict=True):
            rows = slice(at, at + len(draft.tree))
            at += len(draft.tree)
            method = sequence.speculation.method
            if _teaches_fitting(sequence):
                self._fitting[method].observe(len(walk.nodes) - 1)
            is_left_alone = draft.grown is None and not _looks(sequence)
            if self.drafter(method).ranks_observed and not is_left_alone:
                before = int(sequence.index.tokens[-2]) if len(sequence.index) > 1 else -1
                ranks = Ranked(ranked.ids[rows], ranked.gaps[rows])
                emitted = np.array(walk.tokens, np.int32)
                verified = Verified(draft, before, np.array(walk.nodes), emitted, ranks)
                groups.setdefault(method, []).append(verified)
        for method, group in groups.items():
            self.drafter(method).observe(group)

    def look_ahead(
        self, ready: Sequence[EngineSequence], ranking: Ranking, walks: Sequence[Walk], drafts: Sequence[Draft]
    ) -> None:
        """Rank next-next guesses by the logits that chose each last token, and send the next step's queries.

        After the sequences were extended by what the step emitted.
        """
        first = np.cumsum([0, *(len(d.tree) for d in drafts)])
        going_on = [b for b, s in enumerate(ready) if s.finish_reason is None and _looks(s) and self._nodes(s) > 1]
        for sequence in ready:  # what is not ranked now belongs to an earlier token
            sequence.guesses, sequence.gaps = sequence.guesses[:0], sequence.gaps[:0]
        wanted = [(b, count) for b in going_on if (count := self._guesses_wanted(ready[b]))]
        if wanted:
            rows = [int(first[b]) + walks[b].nodes[-1] for b, _ in wanted]
            ranked = ranking.best(1 + max(count for _, count in wanted), rows)
            for (b, count), ids, gaps in zip(wanted, ranked.ids, ranked.gaps, strict=True):
                others = ids != walks[b].tokens[-1]
                ready[b].guesses, ready[b].gaps = ids[others][:count], gaps[others][:count]
        if self._corpus is not None:
            for (_, method), members in _by_method([ready[b] for b in going_on]).items():
                self.drafter(method).ask([self._context(ready[going_on[i]]) for i in members])

    def _guesses_wanted(self, sequence: EngineSequence) -> int:
        wanted = self.drafter(sequence.speculation.method).guesses_wanted(self._nodes(sequence))
        return min(wanted, _MOST_GUESSES) if sequence.speculation.is_budgeted else wanted

    def _drafts(self, sequences: Sequence[EngineSequence], rows: int, context: int, batch: int) -> list[Draft]:
        """What a method proposes.

        Args:
            sequences: all that it drafts for, with a budget or without.
            rows: tokens that the step computes beside these drafts.
            context: tokens of context of all the step's sequences.
            batch: number of those.
        """
        method, is_budgeted = sequences[0].speculation.method, sequences[0].speculation.is_budgeted
        fitted = sum(s.speculation.is_fitted for s in sequences)
        if fitted:
            most = fitted * (self._default_capacity - 1)
            self._fitting[method].choose(self._costs(rows, most, context, batch)[::fitted])
        drafts = [_root_alone(s) for s in sequences]
        asking = [i for i, s in enumerate(sequences) if self._nodes(s) > 1]
        if asking:
            contexts = [self._context(sequences[i]) for i in asking]
            most = sum(c.capacity - 1 for c in contexts)
            costs = self._costs(rows, most, context, batch) if is_budgeted else None
            for i, draft in zip(asking, self.drafter(method).propose(contexts, costs), strict=True):
                drafts[i] = draft
        return drafts

    def _costs(self, rows: int, most: int, context: int, batch: int) -> NDArray[np.float64]:
        """float64 [most + 1]: seconds of the step by draft tokens, as far as the step is for those who draft.

        What prompts take of it is left out: a draft makes a step that is long because of them hardly longer, and still
        keeps them waiting as much as it would make a short one longer.
        """
        costs = self._times.of_drafting(rows, most, context, batch)
        if rows == batch:
            return costs
        without_prompts = self._times.of_drafting(batch, 0, context, batch)[0]
        return costs - (costs[0] - without_prompts)

    def _nodes(self, sequence: EngineSequence) -> int:
        """Most nodes of the sequence's trees now; what its request allows may be more."""
        if sequence.speculation.is_fitted:
            return self._fitting[sequence.speculation.method].capacity
        return sequence.capacity

    def _context(self, sequence: EngineSequence) -> DraftContext:
        prediction = None
        if sequence.prediction is not None:
            prediction = sequence.prediction.place(sequence.index.tokens[sequence.prompt_tokens :])
        return DraftContext(
            sequence.index,
            self._nodes(sequence),
            sequence.remaining - 1,
            sequence.guesses,
            sequence.gaps,
            prediction,
            heat_of(sequence.params.temperature),
        )


def _root_alone(sequence: EngineSequence) -> Draft:
    """A tree without drafts."""
    return Draft(single_node(int(sequence.index.tokens[-1])), retrieved=False)


def _by_method(sequences: Sequence[EngineSequence]) -> dict[tuple[bool, Method], list[int]]:
    """Positions of the sequences that draft by one method, with or without a budget.

    Those with a budget come last: the others' nodes count in it.
    """
    groups: dict[tuple[bool, Method], list[int]] = {}
    for i, sequence in enumerate(sequences):
        groups.setdefault((sequence.speculation.is_budgeted, sequence.speculation.method), []).append(i)
    return dict(sorted(groups.items()))


def _looks(sequence: EngineSequence) -> bool:
    """Whether to look for drafts: a method that chooses how much pays looks only now and then while nothing does."""
    if (
        not sequence.speculation.is_budgeted
        or sequence.prediction is not None
        or sequence.sampling.constraint is not None
    ):
        return True
    every = _PATIENCE if sequence.fruitless < _RESIGNED else 2 * _PATIENCE
    return sequence.fruitless < _PATIENCE or sequence.fruitless % every == 0


def _teaches_fitting(sequence: EngineSequence) -> bool:
    """Whether the sequence's drafts are a fitted method's alone."""
    return (
        sequence.speculation.is_fitted
        and len(sequence.output_ids) > 0  # the first token is chosen without drafts
        and sequence.prediction is None
        and sequence.sampling.constraint is None
    )


def _refined(draft: Draft, sequence: EngineSequence) -> Draft:
    """A method's draft with what the request's prediction and constraint add to it, and without what they forbid."""
    constraint = sequence.sampling.constraint
    prediction = sequence.prediction if draft.grown is None else None  # else it is in the tree already
    capacity = sequence.capacity
    if capacity == 1 or (constraint is None and prediction is None):
        return draft
    builder = TreeBuilder(capacity)
    builder.reset(int(draft.tree.tokens[0]))
    depth = min(capacity, sequence.remaining) - 1
    if constraint is not None:
        builder.add_path(np.asarray(constraint.forced()[:depth], np.int32), GRAMMAR)
    if prediction is not None:
        for path in prediction.paths(sequence.index.tokens[sequence.prompt_tokens :], depth):
            builder.add_path(path, PREDICTION)
    builder.add_tree(draft.tree)
    tree = builder.build()
    return Draft(tree if constraint is None else prune(tree, constraint), draft.retrieved)
