"""What the target thought at drafted tokens that it rejected: the ways that leave an answer, as a trie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cluster.decoding.drafting import Draft, DraftContext, Drafter, Verified
from cluster.decoding.ranking import Ranked
from cluster.decoding.tree import DraftTree

_UNKNOWN = -1


class Recorder(Drafter):
    """A drafter that keeps what verification said of its drafts.

    Attributes:
        verified: step by step, for whoever asks to take away.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.verified: list[Verified] = []

    @property
    def ranks_observed(self) -> int:
        return self._drafter.ranks_observed

    def guesses_wanted(self, capacity: int) -> int:
        return self._drafter.guesses_wanted(capacity)

    def propose(self, contexts: Sequence[DraftContext], costs: NDArray[np.float64] | None = None) -> list[Draft]:
        return self._drafter.propose(contexts, costs)

    def observe(self, verified: Sequence[Verified]) -> None:
        self.verified += verified
        self._drafter.observe(verified)


@dataclass(slots=True)
class Rejections:
    """Nodes off one answer, each by the tokens from where its path leaves the answer to it.

    Attributes:
        parents: the node before each, or ~p for the first off the answer, if p answer tokens are before it.
        tokens: the rejected token of each.
        ids, gaps: node by node, K each: the best ids behind it and their logits' distances from the best one.
    """

    parents: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    _places: dict[tuple[int, int], int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._places = {place: i for i, place in enumerate(zip(self.parents, self.tokens, strict=True))}

    @staticmethod
    def on_the_way(answer: Sequence[int], steps: Iterable[Verified]) -> Rejections:
        """Those of the steps, prefill included, that emitted this answer, or its beginning."""
        found = Rejections()
        position = 0
        for step in steps:
            emitted = step.emitted.tolist()
            if emitted != list(answer[position : position + len(emitted)]):
                break
            found.add(step, position)
            position += len(emitted)
        return found

    def add(self, verified: Verified, position: int) -> None:
        """Keep what was ranked at the rejected nodes of a tree whose root is behind ``position`` answer tokens."""
        tree, visited = verified.draft.tree, verified.nodes
        found = np.full(len(tree), _UNKNOWN)
        for node in _rejected(tree, visited):
            place = _place(tree, node, visited, found, position)
            found[node] = self._places.setdefault(place, len(self.tokens))
            if found[node] == len(self.tokens):
                self.parents.append(place[0])
                self.tokens.append(place[1])
                self.ids += verified.ranked.ids[node].tolist()
                self.gaps += verified.ranked.gaps[node].tolist()

    def ranked(self, tree: DraftTree, visited: NDArray[np.int64], position: int, count: int) -> Ranked:
        """The ``count`` best ids at the nodes of such a tree; -1 at visited ones and where they are not known."""
        ids = np.full((len(tree), count), -1, np.int32)
        gaps = np.zeros((len(tree), count), np.float32)
        width = len(self.ids) // len(self.tokens) if self.tokens else 0
        found = np.full(len(tree), _UNKNOWN)
        for node in _rejected(tree, visited):
            at = found[node] = self._places.get(_place(tree, node, visited, found, position), _UNKNOWN)
            if at != _UNKNOWN:
                row = slice(at * width, at * width + min(count, width))
                ids[node, : min(count, width)], gaps[node, : min(count, width)] = self.ids[row], self.gaps[row]
        return Ranked(ids, gaps)


def _rejected(tree: DraftTree, visited: NDArray[np.int64]) -> list[int]:
    return np.setdiff1d(np.arange(len(tree)), visited).tolist()


def _place(
    tree: DraftTree, node: int, visited: NDArray[np.int64], found: NDArray[np.int64], position: int
) -> tuple[int, int]:
    """A node's parent, as in ``Rejections.parents``, and its token; ``found`` has a parent that is off the answer."""
    parent = int(tree.parents[node])
    above = ~(position + int(tree.depths[parent])) if parent in visited else int(found[parent])
    return above, int(tree.tokens[node])
