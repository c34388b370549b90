"""Draws for many rows of logits at once, for devices whose answers are slow to come: all come in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.decoding.params import SamplingParams
from cluster.decoding.sampling import CANDIDATES, draw_row, uniform_noise

_ROWS_AT_ONCE = 64  # which bounds the memory


def draw_rows(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """A token for each row: the one that ``sampling.choose`` draws where nothing is rewritten.

    Args:
        logits: float [R, V].
        params: R requests' parameters, none of temperature 0.
        positions: R output positions, which give the noise.
    """
    noise = [uniform_noise(p.seed, position) for p, position in zip(params, positions, strict=True)]
    found = []
    for at in range(0, len(params), _ROWS_AT_ONCE):
        part = slice(at, at + _ROWS_AT_ONCE)
        found.append(_draw_together(logits[part].float(), params[part], noise[part]))
    tokens: list[int] = torch.cat(found).tolist() if found else []
    for row, token in enumerate(tokens):
        if token < 0:
            probs = torch.softmax(logits[row].float() / params[row].temperature, dim=-1)
            tokens[row] = draw_row(probs, params[row], noise[row])
    return tokens


def _draw_together(logits: Tensor, params: Sequence[SamplingParams], noise: Sequence[float]) -> Tensor:
    """int64 [R]; -1 where a row's nucleus may reach beyond the candidates."""
    device = logits.device
    numbers = [[p.temperature, p.top_k, p.top_p, p.min_p, u] for p, u in zip(params, noise, strict=True)]
    columns = torch.tensor(numbers, dtype=torch.float64, device=device).T[:, :, None]
    uniform = columns[4]
    temperature, top_k, top_p, min_p = columns[:4].float()
    probs = torch.softmax(logits / temperature, dim=-1)
    vocabulary = probs.shape[1]
    if all(_keeps_all(p) for p in params):
        return _invert(probs, uniform)[:, 0]
    count = min(vocabulary, max(CANDIDATES, *(p.top_k for p in params)))
    if any(_keeps_all(p) for p in params):
        count = vocabulary
    values, ids = torch.topk(probs, count)
    has_top_k = top_k > 0
    inside = torch.arange(count, device=device) < torch.where(has_top_k, top_k, vocabulary)
    values = values * inside
    total = torch.where(has_top_k, values.sum(dim=-1, keepdim=True), 1.0)
    before = torch.cumsum(values, dim=-1) - values
    keep = inside & ((top_p >= 1.0) | (before < top_p * total)) & (values >= min_p * values[:, :1])
    keep[:, 0] = True  # whatever a top_p too small for float32 says
    is_sure = has_top_k[:, 0] | ~keep[:, -1] | (count == vocabulary)
    ids, order = ids.sort(dim=-1)
    chosen = ids.gather(1, _invert((values * keep).gather(1, order), uniform))[:, 0]
    return torch.where(is_sure, chosen, -1)


def _keeps_all(params: SamplingParams) -> bool:
    return not params.top_k and params.top_p == 1.0 and params.min_p == 0.0


def _invert(mass: Tensor, uniform: Tensor) -> Tensor:
    """int64 [R, 1]: where the cumulated mass [R, N] first exceeds its share ``uniform`` [R, 1]."""
    cumulative = torch.cumsum(mass, dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))  # so that no token without mass is ever the last resort
    return torch.searchsorted(cumulative, torch.minimum(uniform * total, below), right=True)
