"""What each draft source says about a candidate token, as buckets: the features of the acceptance estimate.

A candidate has one bucket a source. Bucket 0 means that the source does not name the token. The estimate of
P(accepted | parent accepted) is a logistic function of the sum of the buckets' weights, so sources that agree add up
and none has to be trusted over another by rule.

Who changes a number here must learn the priors anew (``python -m eval_jobs priors``) and remove the compiled code in
``__pycache__`` (``*.nbi``), as numba looks only at the file in which a function stands.
"""

from __future__ import annotations

import numpy as np
from numba import njit

# Columns of evidence, and the first weight of each source's buckets in the flat table of weights.
DEPTH, CONTEXT, GUESS, SUCCESSOR, PAIR, CORPUS, PREDICTION = range(7)
COLUMNS = 7

LONGEST_MATCH = 16  # tokens of a context match that are told apart
LOWEST_GUESS = 64  # ranks of next-next guesses that are told apart
SUCCESSORS = 8  # ranked successors remembered of a token

DEPTHS = 4
HEATS = 3  # greedy, cool, hot: the flatter the target's choice is drawn from, the less comes true
_MATCH_CLASSES, _ORDERS, _SUPPORTS = 7, 3, 3
_GUESS_CLASSES, _GAPS = 11, 6
_SIZES, _SHARES, _COUNTS = 8, 6, 4
_RUNS = 7
_WIDTHS = (
    DEPTHS * HEATS,
    1 + 2 * _MATCH_CLASSES * _ORDERS * _SUPPORTS,
    1 + _GUESS_CLASSES * _GAPS,
    1 + SUCCESSORS * _GAPS,
    1 + SUCCESSORS * _GAPS,
    1 + _SIZES * _SHARES * _COUNTS,
    1 + _RUNS,
)
OFFSETS = tuple(int(offset) for offset in np.concatenate(([0], np.cumsum(_WIDTHS)[:-1])))
WEIGHTS = sum(_WIDTHS)
ABSENT = np.array(OFFSETS, np.int16)  # evidence of a candidate that nobody names

_CONTEXT_AT, _GUESS_AT, _SUCCESSOR_AT, _PAIR_AT, _CORPUS_AT, _PREDICTION_AT = OFFSETS[1:]


@njit(cache=True, nogil=True, inline="always")
def depth_bucket(parent_depth: int, heat: int) -> int:
    """How far down the candidate's parent is, and how the target's choice is drawn."""
    return heat * DEPTHS + min(parent_depth, DEPTHS - 1)


def heat_of(temperature: float) -> int:
    """0 for greedy choices, 1 up to a temperature of 0.8, else 2."""
    if temperature == 0.0:
        return 0
    return 1 if temperature <= 0.8 else 2


@njit(cache=True, nogil=True, inline="always")
def context_bucket(matched: int, order: int, support: int, contested: bool) -> int:
    """Of a token that followed an earlier occurrence of the path's last tokens.

    Args:
        matched: tokens in common before it, 1 or more.
        order: candidates with a longer, or as long and more recent, match.
        support: occurrences looked at that it followed.
        contested: whether another token followed as long a match.
    """
    if matched <= 3:
        length = matched - 1
    elif matched <= 5:
        length = 3
    elif matched <= 8:
        length = 4
    else:
        length = 5 if matched < LONGEST_MATCH else 6
    at = (length * _ORDERS + min(order, _ORDERS - 1)) * _SUPPORTS + min(support, _SUPPORTS) - 1
    return _CONTEXT_AT + 1 + 2 * at + (1 if contested else 0)


@njit(cache=True, nogil=True, inline="always")
def gap_class(gap: float) -> int:
    """Of the distance of a token's logit from the best one."""
    if gap < 0.5:
        return 0
    if gap < 1.0:
        return 1
    if gap < 2.0:
        return 2
    if gap < 3.5:
        return 3
    return 4 if gap < 5.5 else 5


@njit(cache=True, nogil=True, inline="always")
def guess_bucket(rank: int, gap: int) -> int:
    """Of a next-next guess with this rank (from 1, the chosen token left out) and class of gap."""
    if rank <= 4:
        level = rank - 1
    elif rank <= 8:
        level = 4 + (rank - 5) // 2
    elif rank <= 16:
        level = 6 + (rank - 9) // 4
    else:
        level = 8 + min((rank - 17) // 16, 2)
    return _GUESS_AT + 1 + level * _GAPS + gap


@njit(cache=True, nogil=True, inline="always")
def successor_bucket(rank: int, gap: int) -> int:
    """Of a token that the target ranked (from 0) after the parent's token earlier."""
    return _SUCCESSOR_AT + 1 + rank * _GAPS + gap


@njit(cache=True, nogil=True, inline="always")
def pair_bucket(rank: int, gap: int) -> int:
    """Of a token that the target ranked (from 0) after the parent's and its parent's token earlier."""
    return _PAIR_AT + 1 + rank * _GAPS + gap


@njit(cache=True, nogil=True, inline="always")
def corpus_bucket(matched: int, count: int, total: int) -> int:
    """Of a token seen `count` of `total` times behind an n-gram of `matched` tokens in the corpus."""
    share = count / max(total, 1)
    if share >= 0.9:
        part = 0
    elif share >= 0.6:
        part = 1
    elif share >= 0.3:
        part = 2
    elif share >= 0.15:
        part = 3
    else:
        part = 4 if share >= 0.05 else 5
    level = 0 if total <= 1 else 1 if total <= 3 else 2 if total <= 12 else 3
    return _CORPUS_AT + 1 + ((min(matched, _SIZES) - 1) * _SHARES + part) * _COUNTS + level


@njit(cache=True, nogil=True, inline="always")
def prediction_bucket(run: int) -> int:
    """Of the next token of a predicted output whose last `run` tokens came true."""
    level = 0
    while run > 0 and level < _RUNS - 1:
        level += 1
        run //= 2
    return _PREDICTION_AT + 1 + level
