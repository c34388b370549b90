"""Drafting from a prediction: a text that the caller expects the answer to repeat for the most part."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cluster.decoding.candidates import Predicted

_LONGEST = 8  # tokens of the answer compared to find its place in the prediction again
_SHARE = 0.97  # of predicted tokens that come true, until the answer says more
_RATE = 1 / 32  # of one token in that share


class Prediction:
    """Follows an answer through the prediction.

    While the answer repeats the prediction, what comes next in it is the draft. Where they part, the place is found
    again by the longest end of the answer that occurs in the prediction, the nearest one if there are several; until
    one is found, the answer is taken to replace the token at which they parted.
    """

    def __init__(self, tokens: NDArray[np.int32]) -> None:
        """Follow ``tokens`` (int32 [L])."""
        self._tokens = tokens
        self._at = 0  # index of the next token, or of the one at which the answer parted
        self._lost = False
        self._run = 0  # tokens in a row that came true
        self._seen = 0
        self._share = _SHARE

    def paths(self, answer: NDArray[np.int32], limit: int) -> list[NDArray[np.int32]]:
        """Drafts behind ``answer`` (int32 [N], all tokens emitted so far), of ``limit`` tokens together at most."""
        self._catch_up(answer)
        if not self._lost:
            return [self._tokens[self._at : self._at + limit]]
        half = limit // 2
        return [self._tokens[self._at + 1 : self._at + 1 + limit - half], self._tokens[self._at : self._at + half]]

    def place(self, answer: NDArray[np.int32]) -> Predicted:
        """Where ``answer`` (int32 [N], all tokens emitted so far) is in the prediction."""
        self._catch_up(answer)
        return Predicted(self._tokens, self._at + self._lost, self._run, self._share)

    def _catch_up(self, answer: NDArray[np.int32]) -> None:
        for at in range(self._seen, len(answer)):
            self._follow(answer[: at + 1])
        self._seen = len(answer)

    def _follow(self, answer: NDArray[np.int32]) -> None:
        hit = not self._lost and self._at < len(self._tokens) and self._tokens[self._at] == answer[-1]
        self._share += _RATE * (hit - self._share)
        if hit:
            self._at += 1
            self._run += 1
            return
        self._run = 0
        place = self._find(answer)
        self._lost = place is None
        if place is not None:
            self._at = place

    def _find(self, answer: NDArray[np.int32]) -> int | None:
        """Index behind the occurrence of the longest end of ``answer``, or None if its last token never occurs."""
        places = np.flatnonzero(self._tokens == answer[-1])
        if not len(places):
            return None
        for back in range(1, min(_LONGEST, len(answer))):
            inside = places[places >= back]
            longer = inside[self._tokens[inside - back] == answer[-1 - back]]
            if not len(longer):
                break
            places = longer
        return int(places[np.abs(places - self._at).argmin()]) + 1
