"""The few shapes that steps are rounded up to, so that each can be recorded once and replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_TOKENS = 512  # of a step that is recorded
WIDEST_SEGMENT = 128  # a longer chunk of a prompt keeps a GPU busy without being recorded
_FEWEST_KEYS = 128
_TILE_WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)
_GATHERING = 64  # bringing a key to a tile costs about as much as scoring it for so many queries


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a step's tensors.

    Attention sees tiles: up to ``width`` tokens of one sequence, which share its keys. A sequence that is wider is
    cut into several tiles, so that one wide sequence does not pad all others to its width.

    Attributes:
        tokens: T, tokens in the packed row, which everything but attention sees.
        tiles: N.
        width: W, queries of a tile.
        keys: S, keys of a tile: the longest context in the batch, the new tokens counted.
    """

    tokens: int
    tiles: int
    width: int
    keys: int

    @staticmethod
    def of(widths: Sequence[int], lengths: Sequence[int]) -> StepShape | None:
        """The shape for sequences of so many new tokens behind so many old ones; None if it is not worth recording."""
        total, widest = sum(widths), max(widths)
        if total > MOST_TOKENS or widest > WIDEST_SEGMENT:
            return None
        options = [w for w in _TILE_WIDTHS if w < 2 * widest]
        width = min(options, key=lambda w: (_tiles(widths, w) * (w + _GATHERING), -w))
        longest = max(length + width for length, width in zip(lengths, widths, strict=True))
        return StepShape(round_up(total), _tiles(widths, width), width, max(_FEWEST_KEYS, round_up(longest)))


def round_up(count: int) -> int:
    """The next of 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ...: powers of two, from 16 on with one step between them."""
    power = 1 << (count - 1).bit_length()
    return 3 * power // 4 if power > 16 and 4 * count <= 3 * power else power


def _tiles(widths: Sequence[int], width: int) -> int:
    return round_up(sum(-(-w // width) for w in widths))
