"""Few shapes, little padding."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.gpu.shapes import MOST_TOKENS, WIDEST_SEGMENT, StepShape, round_up


def test_sizes_are_few_and_near():
    sizes = [round_up(n) for n in range(1, 4097)]
    assert all(n <= size < 2 * n for n, size in enumerate(sizes, 1))
    assert all(2 * size <= 3 * n + 1 for n, size in enumerate(sizes, 1) if n > 16)
    assert sizes == sorted(sizes)
    assert sorted(set(sizes))[:10] == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96]


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 2000)), min_size=1, max_size=8))
def test_everything_fits(segments):
    widths, lengths = zip(*segments, strict=True)
    shape = StepShape.of(widths, lengths)
    assert shape is not None
    assert shape.tokens >= sum(widths)
    assert shape.tiles >= sum(-(-w // shape.width) for w in widths)
    assert shape.keys >= max(w + n for w, n in segments)


def test_equal_trees_are_a_tile_each():
    assert StepShape.of([16] * 8, [300] * 8) == StepShape(128, 8, 16, 384)
    assert StepShape.of([1] * 32, [100] * 32) == StepShape(32, 32, 1, 128)


def test_a_wide_sequence_does_not_pad_the_others_to_its_width():
    shape = StepShape.of([1] * 31 + [64], [500] * 32)
    assert shape is not None
    assert shape.tiles * shape.width <= 640 < 32 * 64


def test_long_chunks_and_huge_steps_are_not_recorded():
    assert StepShape.of([WIDEST_SEGMENT + 1], [0]) is None
    assert StepShape.of([1] * (MOST_TOKENS + 1), [0] * (MOST_TOKENS + 1)) is None
