"""Method ``adaptive``: the likeliest tree that all sources together can draft, as large as it pays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.decoding.budget import tree_sizes, worthwhile
from cluster.decoding.calibration import Calibration
from cluster.decoding.candidates import CorpusAnswers, Predicted
from cluster.decoding.corpus_queries import CorpusClient, Queries, dual_queries
from cluster.decoding.drafting import Draft, DraftContext, Drafter, Grown, Verified
from cluster.decoding.evidence import ABSENT, COLUMNS, CONTEXT, CORPUS, LOWEST_GUESS, SUCCESSORS
from cluster.decoding.growth import Context, GrownTree, grow
from cluster.decoding.successors import SuccessorTable
from cluster.decoding.tree import CONTEXT as CONTEXT_SOURCE
from cluster.decoding.tree import CORPUS as CORPUS_SOURCE
from cluster.decoding.tree import NEXT_NEXT, PREDICTION, ROOT, SUCCESSOR, DraftTree
from cluster.retrieval.lookup import CorpusLookup, LookupResult, Within

LEAVABLE = ("context", "next_next", "successor", "corpus")
LARGEST_TREE = 64  # nodes grown where the budget is left to the method
_EXTENDED_GUESSES = 16  # guesses that a corpus is asked about
_CORPUS_NODES = 24  # nodes of query 1's trie; a query 2 gets a third of that

_SOURCES = np.array([ROOT, CONTEXT_SOURCE, NEXT_NEXT, SUCCESSOR, SUCCESSOR, CORPUS_SOURCE, PREDICTION], np.int8)

_NO_ANSWERS = CorpusAnswers(*(getattr(LookupResult.empty(0), field) for field in CorpusAnswers._fields))
_NO_PREDICTION = Predicted(np.empty(0, np.int32), -1, 0, 0.0)


class Adaptive(Drafter):
    """Context n-grams, next-next guesses, ranked successors, corpus and predicted output, weighed by evidence.

    Each source says of a candidate what it knows; calibrated weights turn that into P(accepted | parent accepted)
    (``evidence``, ``calibration``). Trees grow best-first by path probability (``growth``), and the nodes that raise
    the expected tokens per second of the whole batch are drafted (``budget``).
    """

    def __init__(
        self,
        vocabulary: int,
        corpus: CorpusLookup | None = None,
        calibration: Calibration | None = None,
        without: str | None = None,
    ) -> None:
        """Draft for a model with so many token ids, maybe without one of the sources, to see what it brings.

        Args:
            vocabulary: number of token ids.
            corpus: reference corpus, if there is one.
            calibration: weights to start from instead of the shipped priors.
            without: a source of ``LEAVABLE`` that is not heard.
        """
        self._corpus = None
        if corpus is not None and without != "corpus":
            self._corpus = CorpusClient(Within(corpus, vocabulary))
        self._without = without
        self._calibration = calibration or Calibration()
        self._successors = SuccessorTable(vocabulary)

    @property
    def ranks_observed(self) -> int:
        return SUCCESSORS

    def guesses_wanted(self, capacity: int) -> int:
        return min(LOWEST_GUESS, 4 * (capacity - 1))

    def ask(self, contexts: Sequence[DraftContext]) -> None:
        if self._corpus is not None:
            self._corpus.ask(self._queries(self._corpus.width, contexts))

    def propose(self, contexts: Sequence[DraftContext], costs: NDArray[np.float64] | None = None) -> list[Draft]:
        floor = 0.0 if costs is None else worthwhile(costs, len(contexts))
        answers = self._answers(contexts)
        grown = [self._grow(c, floor, a) for c, a in zip(contexts, answers, strict=True)]
        if costs is None:
            sizes = [len(g.tree) for g in grown]
        else:
            sizes = tree_sizes([g.probabilities for g in grown], costs)
        return [Draft(g.tree.first(n), g.retrieved, g) for g, n in zip(grown, sizes, strict=True)]

    def observe(self, verified: Sequence[Verified]) -> None:
        for v in verified:
            if v.draft.grown is not None:
                tree = v.draft.grown.tree
                self._calibration.observe(tree.tokens, tree.parents, v.draft.grown.proofs, v.nodes, v.emitted)
            if self._without != "successor":
                self._successors.observe(v.before, v.draft.tree.tokens, v.draft.tree.parents, v.ranked, v.nodes)

    def _queries(self, width: int, contexts: Sequence[DraftContext]) -> Queries:
        room = np.array([min(_CORPUS_NODES, c.capacity) for c in contexts], np.int32)
        return dual_queries(contexts, width, _EXTENDED_GUESSES, room, -(-room // 3))

    def _answers(self, contexts: Sequence[DraftContext]) -> list[CorpusAnswers]:
        """What the corpus says of each sequence."""
        if self._corpus is None:
            return [_NO_ANSWERS] * len(contexts)
        queries = self._queries(self._corpus.width, contexts)
        found = self._corpus.answers(queries)
        asked = zip(queries.first.tolist(), queries.asked.tolist(), strict=True)
        return [_answers(found, first, count) for first, count in asked]

    def _grow(self, context: DraftContext, floor: float, answers: CorpusAnswers) -> Grown:
        assert len(context.gaps) == len(context.guesses)
        capacity = context.capacity
        tree = GrownTree(
            np.empty(capacity, np.int32),
            np.empty(capacity, np.int32),
            np.empty(capacity, np.int32),
            np.empty(capacity, np.int8),
            np.empty(capacity, np.float32),
            np.empty((capacity, COLUMNS), np.int16),
        )
        tree.tokens[0], tree.parents[0], tree.depths[0], tree.columns[0] = context.index.tokens[-1], -1, 0, 0
        tokens, length, tables, previous = context.index.state
        guesses = 0 if self._without == "next_next" else len(context.guesses)
        size = grow(
            Context(tokens, length, tables[: 0 if self._without == "context" else None], previous),
            context.guesses[:guesses],
            context.gaps[:guesses],
            self._successors.arrays,
            answers,
            _NO_PREDICTION if context.prediction is None else context.prediction,
            self._calibration.weights,
            context.heat,
            context.max_depth,
            floor,
            tree,
        )
        sources = _SOURCES[tree.columns[:size]]
        sources[0] = ROOT
        drafted = DraftTree(tree.tokens[:size], tree.parents[:size], tree.depths[:size], sources)
        named = tree.proofs[1:size, [CONTEXT, CORPUS]] != ABSENT[[CONTEXT, CORPUS]]
        return Grown(drafted, tree.probabilities[:size], tree.proofs[:size], bool(named.any()))


def _answers(found: LookupResult, query: int, asked: int) -> CorpusAnswers:
    """The answers to one sequence's queries."""
    return CorpusAnswers(
        found.matched[query : query + 1 + asked],
        found.totals[query : query + 1 + asked],
        found.offsets[query : query + 2 + asked],
        found.tokens,
        found.parents,
        found.counts,
    )
