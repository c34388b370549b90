"""Verification is a walk from the root: at each node the target's own choice decides, so it is lossless."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from cluster.decoding.batched_draw import draw_rows
from cluster.decoding.sampling import SamplingState, choose, log_probabilities
from cluster.decoding.tree import DraftTree, find_child


@dataclass(slots=True)
class Walk:
    """What verification of one tree emitted.

    Attributes:
        nodes: visited nodes from the root on, one for each emitted token: node i's logits chose token i.
        tokens: emitted tokens; all but the last are draft tokens that were accepted.
        logprobs: for each token its log-probability and those of the top ones, if the request wants them.
    """

    nodes: list[int]
    tokens: list[int]
    logprobs: list[dict[int, float]] | None = None


def verify(
    trees: Sequence[DraftTree], logits: Tensor, best: NDArray[np.int32], states: Sequence[SamplingState]
) -> list[Walk]:
    """Walk every tree of a step.

    Args:
        trees: B draft trees.
        logits: float [sum of W_b, V], the target's logits at the trees' nodes, tree after tree.
        best: int32 [sum of W_b], their argmax.
        states: B sampling states; they observe what is emitted. A walk ends at a stop id or at max_new_tokens.
    """
    offsets = np.concatenate(([0], np.cumsum([len(t) for t in trees])))
    walks: list[Walk | None] = [None] * len(trees)
    for b, (tree, state) in enumerate(zip(trees, states, strict=True)):
        if state.is_plain_greedy:
            walks[b] = _walk_chosen(tree, best[offsets[b] : offsets[b + 1]], state)
    if logits.device.type != "cpu":  # where one copy for all nodes takes less than one for each level
        for b, walk in walk_ahead(trees, logits, offsets, states).items():
            walks[b] = walk
    drawn = [b for b, walk in enumerate(walks) if walk is None]
    for b, walk in zip(drawn, _walk_together(drawn, trees, logits, offsets, states), strict=True):
        walks[b] = walk
    done = [w for w in walks if w is not None]
    for b, walk in enumerate(done):
        top = states[b].params.logprobs
        if top is not None:
            walk.logprobs = log_probabilities(logits[offsets[b] + np.array(walk.nodes)], walk.tokens, top)
    return done


def walk_ahead(
    trees: Sequence[DraftTree], logits: Tensor, offsets: NDArray[np.int64], states: Sequence[SamplingState]
) -> dict[int, Walk]:
    """Walks by number of the trees whose draws depend on nothing but logits and position: drawn at all their nodes."""
    drawn = [b for b, s in enumerate(states) if s.params.temperature > 0.0 and not s.rewrites_logits]
    if not drawn:
        return {}
    rows = np.concatenate([np.arange(offsets[b], offsets[b + 1]) for b in drawn])
    params = [states[b].params for b in drawn for _ in range(len(trees[b]))]
    positions = np.concatenate([states[b].position + trees[b].depths for b in drawn]).tolist()
    chosen = logits if len(rows) == len(logits) else logits[torch.from_numpy(rows).to(logits.device)]
    choices = np.array(draw_rows(chosen, params, positions), np.int32)
    parts = np.split(choices, np.cumsum([len(trees[b]) for b in drawn])[:-1])
    return {b: _walk_chosen(trees[b], part, states[b]) for b, part in zip(drawn, parts, strict=True)}


def _walk_chosen(tree: DraftTree, choices: NDArray[np.int32], state: SamplingState) -> Walk:
    """The walk where what every node would choose is known."""
    nodes = follow(tree.tokens, tree.parents, choices)
    walk = Walk([], [])
    for node in nodes.tolist():
        if not _emit(walk, node, int(choices[node]), state):
            break
    return walk


def _walk_together(
    drawn: Sequence[int],
    trees: Sequence[DraftTree],
    logits: Tensor,
    offsets: NDArray[np.int64],
    states: Sequence[SamplingState],
) -> list[Walk]:
    """Walk several trees level by level, so that a level's draws are one batch; only visited nodes are processed."""
    walks = {b: Walk([], []) for b in drawn}
    at = dict.fromkeys(drawn, 0)
    while at:
        live = list(at)
        rows = logits[[int(offsets[b]) + at[b] for b in live]]
        for b, token in zip(live, choose(rows, [states[b] for b in live]), strict=True):
            node = at.pop(b)
            if _emit(walks[b], node, token, states[b]):
                child = find_child(trees[b].tokens, trees[b].parents, node, token)
                if child >= 0:
                    at[b] = child
    return list(walks.values())


def _emit(walk: Walk, node: int, token: int, state: SamplingState) -> bool:
    """Record an emitted token; False if the sequence ends with it."""
    walk.nodes.append(node)
    walk.tokens.append(token)
    state.observe(token)
    return token not in state.stop_ids and state.position < state.params.max_new_tokens


@njit(cache=True, nogil=True)
def follow(tokens: NDArray[np.int32], parents: NDArray[np.int32], choices: NDArray[np.int32]) -> NDArray[np.int64]:
    """Visited nodes when node v chooses ``choices[v]``."""
    nodes = np.empty(len(tokens), np.int64)
    node, visited = 0, 0
    while node >= 0:
        nodes[visited] = node
        visited += 1
        node = find_child(tokens, parents, node, choices[node])
    return nodes[:visited]
