"""Tiles give what segments give, whatever lies in rows and buffers that belong to nobody."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cluster.decoding.tree import ancestor_mask
from cluster.engine.attention import PackedBatch, Segment
from cluster.engine.gpu import StepShape, tiles
from cluster.engine.gpu.buffers import StepBuffers
from cluster.engine.gpu.tiles import TileLayout

CPU = torch.device("cpu")
ROWS, HEADS, KV_HEADS, DIM = 400, 4, 2, 8


def tree(start: int, length: int, lead: int, parents: list[int]) -> Segment:
    """A chain of ``lead`` tokens, the last of which is the root of a tree with these parents."""
    size = lead + len(parents)
    everything = np.array([*range(-1, lead - 1), *(lead - 1 + p for p in parents)], np.int32)
    ancestors = ancestor_mask(everything)
    return Segment(start, length, np.arange(size, dtype=np.int32), ancestors.sum(1).astype(np.int32) - 1, ancestors)


def chain(start: int, length: int, width: int) -> Segment:
    numbers = np.arange(width, dtype=np.int32)
    return Segment(start, length, numbers, numbers, None)


STEPS = {
    "a token": [chain(7, 40, 1)],
    "tokens": [chain(0, 40, 1), chain(50, 0, 1), chain(60, 3, 1)],
    "a tree": [tree(20, 33, 1, [0, 0, 1, 1, 0, 4])],
    "ragged": [tree(20, 33, 4, [0, 0, 1]), chain(90, 129, 1), chain(250, 0, 37), tree(300, 60, 1, [0, 1, 2, 0])],
    "cut": [chain(0, 5, 1), chain(30, 80, 1), chain(130, 6, 1), chain(150, 20, 1), chain(200, 17, 90)],
}


@pytest.mark.parametrize("keys_at_once", [1, 1 << 16])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize("segments", STEPS.values(), ids=STEPS)
def test_tiles_give_what_segments_give(monkeypatch, segments, window, softcap, keys_at_once):
    monkeypatch.setattr(tiles, "_KEYS_AT_ONCE", keys_at_once)
    shape = StepShape.of([s.width for s in segments], [s.length for s in segments])
    assert shape is not None
    buffers = StepBuffers(shape, CPU, spare_row=ROWS)
    keep = np.unique([0, sum(s.width for s in segments) - 1])
    buffers.fill([chain(0, 100, min(shape.tokens, shape.width))], np.array([0]))  # what was there is forgotten
    buffers.fill(segments, keep)
    batch = PackedBatch.of(segments, CPU, kernels=False)
    total = len(batch.rows)
    assert buffers.inputs.ids[:total].tolist() == batch.input_ids().tolist()
    assert buffers.inputs.positions[:total].tolist() == batch.position_ids().tolist()
    assert buffers.inputs.rows[:total].tolist() == batch.rows.tolist()
    assert set(buffers.inputs.rows[total:].tolist()) <= {ROWS}
    assert buffers.inputs.keep[: len(keep)].tolist() == keep.tolist()

    torch.manual_seed(0)
    query = torch.randn(1, HEADS, shape.tokens, DIM)
    key, value = (torch.randn(KV_HEADS, ROWS + 1, DIM) for _ in range(2))
    for segment in segments:  # rows that hold nothing hold the worst
        key[:, segment.start + segment.length + segment.width] = torch.nan
        value[:, segment.start + segment.length + segment.width] = torch.nan
    key[:, ROWS] = value[:, ROWS] = torch.nan
    expected = batch.attend(query[:, :, :total], key, value, 0.3, window, softcap)
    found = TileLayout(shape, buffers.inputs).attend(query, key, value, 0.3, window, softcap)
    assert found.shape == (shape.tokens, HEADS, DIM)
    torch.testing.assert_close(found[:total], expected)
