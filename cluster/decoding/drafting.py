"""What a method is: what it is told, what it proposes, what it learns from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from cluster.decoding.candidates import Predicted
from cluster.decoding.ngram_index import NgramIndex
from cluster.decoding.ranking import Ranked
from cluster.decoding.tree import DraftTree


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter knows of one sequence when it proposes.

    Attributes:
        index: the sequence's tokens and n-grams; its last token is x(i+1), the root of the tree to come.
        capacity: most nodes the tree may have, counting the root.
        max_depth: deepest node worth drafting: the tokens that may still be emitted, less the one every step emits.
        guesses: int32 [K], next-next guesses: the tokens ranked highest by the logits that chose x(i+1),
            best first, x(i+1) itself left out. Empty for drafters with ``guesses_wanted == 0``.
        gaps: float32 [K], distance of the guesses' logits from the highest one.
        prediction: an output that the caller expects, and where the answer is in it.
        heat: how the target's choices are drawn (``evidence.heat_of``).
    """

    index: NgramIndex
    capacity: int
    max_depth: int
    guesses: NDArray[np.int32]
    gaps: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    prediction: Predicted | None = None
    heat: int = 0


@dataclass(frozen=True, slots=True)
class Grown:
    """All that a method found worth considering, of which a tree's first nodes are drafted.

    Attributes:
        tree: nodes by falling path probability.
        probabilities: float32 [W], of the path to each node.
        proofs: int16 [W, COLUMNS], evidence of each node.
        retrieved: as in ``Draft``.
    """

    tree: DraftTree
    probabilities: NDArray[np.float32]
    proofs: NDArray[np.int16]
    retrieved: bool


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft tree, whether looking for continuations found any, and what the tree was taken from."""

    tree: DraftTree
    retrieved: bool
    grown: Grown | None = None


@dataclass(frozen=True, slots=True)
class Verified:
    """What became of a draft.

    Attributes:
        draft: what was proposed.
        before: the token before the root, -1 if there is none.
        nodes: int64 [N], visited nodes, root first.
        emitted: int32 [N], the token that the target chose at each.
        ranked: the tokens ranked highest at the draft tree's nodes; a row of ids -1 where that is not known.
    """

    draft: Draft
    before: int
    nodes: NDArray[np.int64]
    emitted: NDArray[np.int32]
    ranked: Ranked


@runtime_checkable
class Drafter(Protocol):
    """A method: proposes one tree a sequence, for the whole batch in one call."""

    @property
    def ranks_observed(self) -> int:
        """How many of the best tokens at each node ``observe`` wants; 0 if it is not to be called."""
        return 0

    def guesses_wanted(self, capacity: int) -> int:
        """How many next-next guesses ``propose`` can use at this capacity; 0 saves the engine ranking them."""
        return 0

    def ask(self, contexts: Sequence[DraftContext]) -> None:
        """Send the corpus what ``propose`` will want to know of these contexts, so that it need not wait for it."""
        return

    def propose(self, contexts: Sequence[DraftContext], costs: NDArray[np.float64] | None = None) -> list[Draft]:
        """Draft trees in the order of ``contexts``, none larger than its capacity.

        Args:
            contexts: the sequences to draft for.
            costs: float64 [M + 1], seconds that the step takes if 0..M tokens are drafted for all of them, for methods
                that choose by it how many are; None leaves it at the capacities.
        """
        ...

    def observe(self, verified: Sequence[Verified]) -> None:
        """Learn from what verification said of this method's drafts."""
        return
