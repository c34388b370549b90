"""From logits to the target's own choice, with noise that depends on (seed, position) and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cluster.decoding.constraint import Constraint
from cluster.decoding.params import SamplingParams

CANDIDATES = 512  # top tokens tried before a full sort; holds the nucleus of all but the flattest distributions
_MASK64 = (1 << 64) - 1


@dataclass(slots=True)
class SamplingState:
    """One sequence's side of the sampler: what has been seen and emitted so far.

    Attributes:
        params: the request's parameters.
        stop_ids: token ids that end the sequence (the model's, unless ignored, and the request's).
        prompt: the prompt's distinct token ids (repetition penalty counts them as seen).
        emitted: how often each token was emitted.
        position: tokens emitted so far, which is the position of the next one.
        constraint: what the next token may be; None allows all.
    """

    params: SamplingParams
    stop_ids: frozenset[int]
    prompt: frozenset[int]
    emitted: Counter[int] = field(default_factory=Counter)
    position: int = 0
    constraint: Constraint | None = None

    @property
    def rewrites_logits(self) -> bool:
        """True if the choice depends on more than the raw logits' argmax or temperature."""
        return self.params.rewrites_logits or self.constraint is not None

    @property
    def is_plain_greedy(self) -> bool:
        """True if the choice is the raw logits' argmax, whatever was emitted before."""
        return self.params.temperature == 0.0 and not self.rewrites_logits

    def observe(self, token: int) -> None:
        """Account for an emitted token."""
        self.position += 1
        if self.params.rewrites_logits:
            self.emitted[token] += 1
        if self.constraint is not None and token not in self.stop_ids:
            self.constraint.observe(token)


def uniform_noise(seed: int, position: int) -> float:
    """A uniform number in [0, 1) that is a fixed function of seed and output position.

    Counter-based (two rounds of the splitmix64 finaliser over the pair), so drawing the i-th token of a request needs
    no generator state: any method, batch or retry draws the same noise there.
    """
    return (_splitmix(_splitmix(seed & _MASK64) ^ position) >> 11) * 2.0**-53


def _splitmix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def choose(logits: Tensor, states: Sequence[SamplingState]) -> list[int]:
    """The next token of each sequence.

    Args:
        logits: float [B, V], row b for ``states[b]``; not modified.
        states: B sampling states.
    """
    logits = rewrite_logits(logits.float(), states)
    chosen: list[int] = logits.argmax(-1).tolist()
    drawn = [b for b, s in enumerate(states) if s.params.temperature > 0.0]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        for b, token in zip(drawn, _draw(logits[rows], [states[b] for b in drawn]), strict=True):
            chosen[b] = token
    return chosen


def rewrite_logits(logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """Apply penalties, bias and barred stop ids; float32 [B, V], a copy where anything changes."""
    rows = [b for b, s in enumerate(states) if s.rewrites_logits]
    if not rows:
        return logits
    logits = logits.clone()
    for b in rows:
        _rewrite_row(logits[b], states[b])
    return logits


def _rewrite_row(row: Tensor, state: SamplingState) -> None:
    params = state.params
    if params.repetition_penalty != 1.0:  # CTRL (arXiv 1909.05858), over prompt and output as in transformers
        seen = torch.tensor(sorted(state.prompt.union(state.emitted)), device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if state.emitted and (params.presence_penalty or params.frequency_penalty):
        ids = torch.tensor(list(state.emitted), device=row.device)
        counts = torch.tensor(list(state.emitted.values()), dtype=row.dtype, device=row.device)
        row[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=row.device)
        row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)
    if state.position < params.min_new_tokens and state.stop_ids:
        row[torch.tensor(sorted(state.stop_ids), device=row.device)] = -torch.inf
    if state.constraint is not None:
        state.constraint.mask(row)


def _draw(logits: Tensor, states: Sequence[SamplingState]) -> list[int]:
    """One draw a row by inverting the cumulative distribution in vocabulary order at the row's noise."""
    temperatures = torch.tensor([s.params.temperature for s in states], device=logits.device)
    probs = torch.softmax(logits / temperatures[:, None], dim=-1)
    noise = [uniform_noise(s.params.seed, s.position) for s in states]
    return [draw_row(row, state.params, u) for row, state, u in zip(probs, states, noise, strict=True)]


def draw_row(probs: Tensor, params: SamplingParams, noise: float) -> int:
    """Draw from probabilities [V] by inverting the cumulative distribution of what the parameters keep."""
    kept = _kept(probs, params)
    mass = probs if kept is None else probs[kept]
    cumulative = torch.cumsum(mass, 0, dtype=torch.float64)
    target = torch.tensor(noise, dtype=torch.float64, device=probs.device) * cumulative[-1]
    index = torch.searchsorted(cumulative, target, right=True).clamp_(max=len(cumulative) - 1)
    return int(index if kept is None else kept[index])


def _kept(probs: Tensor, params: SamplingParams) -> Tensor | None:
    """Ids that survive top-k, then top-p of what is left, then min-p; ascending int64, or None if all do.

    Applied in transformers' order. Ascending order makes the draw insensitive to how near-ties sort.
    """
    if not params.top_k and params.top_p == 1.0 and params.min_p == 0.0:
        return None
    vocabulary = len(probs)
    limit = min(params.top_k or vocabulary, vocabulary)
    size = limit if params.top_k else min(limit, CANDIDATES)
    while True:
        values, ids = torch.topk(probs, size)
        total = values.sum() if params.top_k else 1.0
        keep = torch.ones_like(values, dtype=torch.bool)
        if params.top_p < 1.0:
            before = torch.cumsum(values, 0) - values
            keep &= before < params.top_p * total
        if params.min_p > 0.0:
            keep &= values >= params.min_p * values[0]
        keep[0] = True  # whatever a top_p too small for float32 says
        if size == limit or not bool(keep[-1]):
            return torch.sort(ids[keep]).values
        size = limit


def log_probabilities(logits: Tensor, tokens: Sequence[int], top: int) -> list[dict[int, float]]:
    """For each row of raw logits [B, V]: the log-probability of ``tokens[b]`` first, then of the ``top`` best ids."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    values, ids = torch.topk(logprobs, min(top, logprobs.shape[-1]))
    chosen = logprobs[torch.arange(len(tokens)), torch.tensor(list(tokens))].tolist()
    rows = zip(tokens, chosen, ids.tolist(), values.tolist(), strict=True)
    return [{token: lp} | dict(zip(row_ids, row_values, strict=True)) for token, lp, row_ids, row_values in rows]
