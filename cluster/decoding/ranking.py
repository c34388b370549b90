"""The tokens that logits rank highest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

_CHUNK = 64  # logits whose maximum is taken before any of them is looked at
_BITS = {4: torch.int32, 2: torch.int16}


@dataclass(frozen=True, slots=True)
class Ranked:
    """The best tokens of R rows of logits.

    Attributes:
        ids: int32 [R, K], by falling logit; of equal ones the smaller id first.
        gaps: float32 [R, K], distance of the logit from the row's best.
    """

    ids: NDArray[np.int32]
    gaps: NDArray[np.float32]


class Ranking:
    """Ranks rows of logits [R, V] as far down as asked, several times at little more than the cost of once.

    On a CPU all logits are read once, for the maxima of chunks, which then tell where to look. From other devices all
    answers come with the first one, in one copy; which of more equal values than were asked for are left out is open
    there.
    """

    def __init__(self, logits: Tensor, deepest: int = 1) -> None:
        """``deepest`` says how far down anyone will ask."""
        self._logits = logits
        self._deepest = deepest
        self._fetched: Ranked | None = None
        self._bits: NDArray[np.int32] | None = None
        if logits.device.type == "cpu" and logits.dtype.is_floating_point and logits.dtype.itemsize in _BITS:
            self._bits = logits.detach().contiguous().view(_BITS[logits.dtype.itemsize]).numpy()
            self._maxima = _chunk_maxima(self._bits)

    def best(self, count: int, rows: Sequence[int] | None = None) -> Ranked:
        """The ``count`` best tokens (all, if there are fewer) of these rows, or of all."""
        numbers = np.arange(len(self._logits)) if rows is None else np.asarray(rows, np.int64)
        count = min(count, self._logits.shape[-1])
        if self._bits is None:
            if self._fetched is None or self._fetched.ids.shape[1] < count:
                self._fetched = self._fetch(min(max(count, self._deepest), self._logits.shape[-1]))
            return Ranked(self._fetched.ids[numbers, :count], self._fetched.gaps[numbers, :count])
        logits = self._logits if rows is None else self._logits[list(rows)]
        ids = _best(self._bits, self._maxima, numbers, count)
        values = torch.gather(logits, 1, torch.from_numpy(ids.astype(np.int64)))
        return Ranked(ids, (values[:, :1] - values).float().numpy())

    def _fetch(self, count: int) -> Ranked:
        """Rank all rows on their device."""
        if count == 1:
            values, ids = self._logits.max(dim=-1, keepdim=True)  # the first of equal ones
        else:
            ids = torch.topk(self._logits, count, dim=-1).indices.sort(dim=-1).values
            values, order = self._logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
            ids = ids.gather(1, order)
        gaps = (values[:, :1] - values).float()
        both = torch.stack((ids.to(torch.int32), gaps.view(torch.int32))).cpu().numpy()
        return Ranked(both[0], both[1].view(np.float32))


@njit(cache=True, nogil=True, inline="always")
def _ordered(bits: np.int32) -> np.int32:
    """An integer that rises with the float of these bits: the lower bits of negative ones are flipped."""
    return np.int32(bits) ^ ((np.int32(bits) >> np.int32(31)) & np.int32(0x7FFFFFFF))


@njit(cache=True, nogil=True)
def _chunk_maxima(bits: NDArray[np.int32]) -> NDArray[np.int32]:
    rows, width = bits.shape
    chunks = -(-width // _CHUNK)
    maxima = np.empty((rows, chunks), np.int32)
    for r in range(rows):
        for c in range(chunks):
            best = _ordered(bits[r, c * _CHUNK])
            for i in range(c * _CHUNK, min(width, (c + 1) * _CHUNK)):
                best = max(best, _ordered(bits[r, i]))
            maxima[r, c] = best
    return maxima


@njit(cache=True, nogil=True)
def _best(bits: NDArray[np.int32], maxima: NDArray[np.int32], rows: NDArray[np.int64], count: int) -> NDArray[np.int32]:
    """Ids of the ``count`` best of some rows, by insertion into a sorted list of them."""
    ids = np.empty((len(rows), count), np.int32)
    keys = np.empty(count, np.int32)
    for r in range(len(rows)):
        row, held = bits[rows[r]], 0
        for c in range(maxima.shape[1]):
            if held == count and maxima[rows[r], c] <= keys[count - 1]:
                continue
            for i in range(c * _CHUNK, min(len(row), (c + 1) * _CHUNK)):
                key = _ordered(row[i])
                if held == count and key <= keys[count - 1]:
                    continue
                held = min(held + 1, count)
                at = held - 1
                while at > 0 and keys[at - 1] < key:
                    keys[at], ids[r, at] = keys[at - 1], ids[r, at - 1]
                    at -= 1
                keys[at], ids[r, at] = key, i
    return ids
