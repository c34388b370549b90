"""How likely evidence makes a candidate: weights that start from shipped priors and follow what verification says."""

from __future__ import annotations

from functools import cache
from importlib import resources

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cluster.decoding.evidence import COLUMNS, OFFSETS, WEIGHTS
from cluster.decoding.growth import estimate

PRIORS_FILE = "priors.npy"
_RATE = 0.01  # of a step along the gradient of the log-likelihood
_DECAY = 1e-4  # of a weight's distance from its prior, with each verified candidate: a thousand steps' memory


class Calibration:
    """The weights of the evidence, shared by all requests of a model.

    A candidate whose parent was reached is a labelled example, whether it was drafted or not: the target's choice there
    is known. Each moves the weights of its buckets by stochastic gradient descent on the logistic loss, and decay pulls
    them back to the priors, so buckets that are no longer seen forget what was special.
    """

    def __init__(self, priors: NDArray[np.float32] | None = None) -> None:
        self._priors = load_priors() if priors is None else priors
        self.weights: NDArray[np.float32] = self._priors.copy()

    def observe(
        self,
        tokens: NDArray[np.int32],
        parents: NDArray[np.int32],
        proofs: NDArray[np.int16],
        nodes: NDArray[np.int64],
        emitted: NDArray[np.int32],
    ) -> None:
        """Learn from one verified tree.

        Args:
            tokens, parents, proofs: [W] and [W, COLUMNS], the grown tree, of which a part was drafted.
            nodes: [N], visited nodes.
            emitted: [N], what the target chose at each.
        """
        _learn(tokens, parents, proofs, nodes, emitted, self.weights, self._priors)


@cache
def load_priors() -> NDArray[np.float32]:
    """Shipped weights float32 [WEIGHTS], learnt from recorded outputs by ``python -m eval_jobs priors``."""
    with resources.as_file(resources.files("cluster.decoding") / PRIORS_FILE) as path:
        priors = np.load(path)
    if priors.shape != (WEIGHTS,):
        raise ValueError(f"{PRIORS_FILE} holds {priors.shape} weights instead of {WEIGHTS}; learn the priors anew")
    return priors.astype(np.float32)


@njit(cache=True, nogil=True)
def _learn(
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
    proofs: NDArray[np.int16],
    nodes: NDArray[np.int64],
    emitted: NDArray[np.int32],
    weights: NDArray[np.float32],
    priors: NDArray[np.float32],
) -> None:
    examples = 0
    for v in range(len(nodes)):
        for child in range(nodes[v] + 1, len(tokens)):
            if parents[child] != nodes[v]:
                continue
            examples += 1
            error = (1.0 if tokens[child] == emitted[v] else 0.0) - estimate(proofs[child], weights)
            for column in range(COLUMNS):
                if column == 0 or proofs[child, column] != OFFSETS[column]:  # absent evidence weighs nothing, ever
                    weights[proofs[child, column]] += np.float32(_RATE * error)
    for i in range(len(weights)):
        weights[i] += np.float32(min(1.0, _DECAY * examples)) * (priors[i] - weights[i])
