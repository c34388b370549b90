"""``python -m eval_jobs priors``: learn the weights that adaptive drafting starts from, and write them to a file.

Recorded answers are replayed under adaptive drafting. Every candidate behind a token that turned out right is an
example: its evidence, and whether the target chose it. Far more candidates are looked at than drafted, as what is seen
only where it is likely seems likely everywhere. Logistic regression gives the weights; those that no example touches
stay neutral. The file shipped with ``cluster.decoding`` was made by this command.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cluster.decoding import evidence as ev
from cluster.decoding.adaptive import Adaptive
from cluster.decoding.calibration import Calibration
from cluster.decoding.drafting import Draft, DraftContext
from cluster.decoding.growth import estimate
from cluster.retrieval import Corpus
from eval_jobs.rows import Trace
from eval_jobs.run_directory import RunDirectory, RunError
from eval_jobs.simulation.replay import replay, vocabulary
from eval_jobs.simulation.step_times import StepCurve

_SEEN, _DRAFTED = 256, 32  # nodes of a tree
_PASSES, _RATE, _SHRINKAGE = 6, 0.3, 1e-4
# Log-odds that sampling takes away: recorded answers are greedy, so these come from runs of 20 prompts at temperatures
# of 0.8 (top-p 0.95) and 1.2, where those that looked good enough to draft came true less often than the rest.
_HEATS = (0.0, 1.5)
# Chances that the next token of a predicted output comes true by the length of the run so far: answers come without
# predictions, so these are assumed and left to online calibration.
_PREDICTED = (0.45, 0.7, 0.85, 0.93, 0.97, 0.985, 0.99)


def add_parser(subcommands: Any) -> None:
    """Declare the command and its options."""
    parser = subcommands.add_parser("priors", help="learn the weights of adaptive drafting", description=__doc__)
    parser.add_argument("--traces", required=True, nargs="+", metavar="RUN", help="sweeps with --record-traces")
    parser.add_argument(
        "--corpus", nargs="*", default=[], metavar="DIR", help="replay with each of these reference corpora too"
    )
    parser.add_argument("--out", required=True, metavar="FILE.npy", help="where to write the weights")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Replay without and with each corpus, and fit the weights.

    Raises:
        RunError: a run has no traces with logits.
        CorpusError: a corpus cannot be opened.
    """
    traces = [t for path in args.traces for t in RunDirectory(path).traces.read() if t.top_ids]
    if not traces:
        raise RunError(f"{', '.join(args.traces)}: no traces; run sweep with --record-traces")
    proofs, outcomes = collect(traces, [None, *map(Corpus.open, args.corpus)])
    weights = fit(proofs, outcomes)
    np.save(args.out, weights)
    print(f"{len(outcomes)} examples, {outcomes.mean():.2%} chosen, log-loss {log_loss(proofs, outcomes, weights):.4f}")


def collect(traces: Sequence[Trace], corpora: Sequence[Corpus | None]) -> tuple[NDArray[np.int16], NDArray[np.bool_]]:
    """Evidence int16 [N, COLUMNS] and outcomes bool [N] of all candidates of a replay with each corpus."""
    longest = max(len(t.output_ids) for t in traces)
    curve = StepCurve(np.ones(1), np.ones(1))  # times do not matter here
    examples = ExampleRecorder()
    for corpus in corpora:
        explorer = Explorer(vocabulary(traces, corpus), corpus, examples)
        replay(explorer, traces, _DRAFTED, longest, curve, told=None)
    return examples.collected()


class Explorer(Adaptive):
    """Grows large trees of which a small part is drafted."""

    def propose(self, contexts: Sequence[DraftContext], costs: NDArray[np.float64] | None = None) -> list[Draft]:
        return super().propose([replace(c, capacity=_SEEN) for c in contexts], np.ones(_DRAFTED))


class ExampleRecorder(Calibration):
    """Keeps what verification says of candidates, beside learning from it."""

    def __init__(self) -> None:
        super().__init__()
        self._proofs: list[NDArray[np.int16]] = []
        self._outcomes: list[NDArray[np.bool_]] = []

    def observe(
        self,
        tokens: NDArray[np.int32],
        parents: NDArray[np.int32],
        proofs: NDArray[np.int16],
        nodes: NDArray[np.int64],
        emitted: NDArray[np.int32],
    ) -> None:
        for node, token in zip(nodes, emitted, strict=True):
            children = np.flatnonzero(parents == node)
            self._proofs.append(proofs[children])
            self._outcomes.append(tokens[children] == token)
        super().observe(tokens, parents, proofs, nodes, emitted)

    def collected(self) -> tuple[NDArray[np.int16], NDArray[np.bool_]]:
        """Evidence int16 [N, COLUMNS] and outcomes bool [N] of all candidates so far."""
        return np.concatenate(self._proofs), np.concatenate(self._outcomes)


def fit(proofs: NDArray[np.int16], outcomes: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Weights float32 [WEIGHTS] by logistic regression; those of absent evidence are 0, as the scale's origin."""
    weights = _descend(proofs, outcomes, np.zeros(ev.WEIGHTS, np.float32), _PASSES, _RATE, _SHRINKAGE)
    greedy = weights[: ev.DEPTHS].copy()
    for heat, less in enumerate(_HEATS, 1):
        weights[heat * ev.DEPTHS : (heat + 1) * ev.DEPTHS] = greedy - less
    for level, chance in enumerate(_PREDICTED):
        bucket = ev.OFFSETS[ev.PREDICTION] + 1 + level
        if weights[bucket] == 0.0:
            weights[bucket] = np.log(chance / (1 - chance)) - weights[ev.OFFSETS[ev.DEPTH]]
    return weights


@njit(cache=True)
def _descend(
    proofs: NDArray[np.int16],
    outcomes: NDArray[np.bool_],
    weights: NDArray[np.float32],
    passes: int,
    rate: float,
    shrinkage: float,
) -> NDArray[np.float32]:
    """Stochastic gradient descent with steps that shrink by Adagrad (Duchi et al. 2011)."""
    np.random.seed(0)
    squares = np.ones(len(weights))
    for _ in range(passes):
        for i in np.random.permutation(len(outcomes)):
            error = estimate(proofs[i], weights) - (1.0 if outcomes[i] else 0.0)
            for column in range(ev.COLUMNS):
                bucket = proofs[i, column]
                if column > 0 and bucket == ev.OFFSETS[column]:
                    continue
                slope = error + shrinkage * weights[bucket]
                squares[bucket] += slope * slope
                weights[bucket] -= rate * slope / np.sqrt(squares[bucket])
    return weights


def log_loss(proofs: NDArray[np.int16], outcomes: NDArray[np.bool_], weights: NDArray[np.float32]) -> float:
    """Mean negative log-likelihood of the outcomes, nats."""
    scores = weights[proofs].sum(axis=1, dtype=np.float64)
    return float(np.logaddexp(0.0, np.where(outcomes, -scores, scores)).mean())
