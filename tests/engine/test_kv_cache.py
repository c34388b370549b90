from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.engine.kv_cache import Extent, ExtentAllocator, KVPool, LayerShape

ROWS = 64
SHAPES = [LayerShape(2, 3, 3), LayerShape(1, 3, 5), LayerShape(2, 3, 3)]


class Allocation(RuleBasedStateMachine):
    """Any order of calls leaves extents disjoint, loses no row, and keeps every extent's contents."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(SHAPES, ROWS, torch.float32, torch.device("cpu"))
        self.held: list[tuple[Extent, float]] = []
        self.mark = 0.0

    def fill(self, extent: Extent) -> float:
        self.mark += 1
        rows = torch.arange(extent.start, extent.start + extent.size)
        for layer, shape in enumerate(SHAPES):
            key = torch.full((shape.kv_heads, extent.size, shape.key_dim), self.mark)
            value = torch.full((shape.kv_heads, extent.size, shape.value_dim), self.mark)
            self.pool.write(layer, key, value, rows)
        return self.mark

    @rule(size=st.integers(1, 30))
    def allocate(self, size):
        extent = self.pool.allocator.allocate(size)
        if extent is not None:
            assert extent.size == size
            self.held.append((extent, self.fill(extent)))

    @rule(data=st.data())
    def free(self, data):
        if self.held:
            extent, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.pool.allocator.free(extent)

    @rule(data=st.data(), extra=st.integers(1, 10))
    def grow(self, data, extra):
        if self.held:
            at = data.draw(st.integers(0, len(self.held) - 1))
            extent, _ = self.held[at]
            size = extent.size
            if self.pool.allocator.grow(extent, size + extra):
                assert extent.size == size + extra
                self.held[at] = (extent, self.fill(extent))
            else:
                assert extent.size == size

    @rule(data=st.data())
    def shrink(self, data):
        if self.held:
            extent, _ = self.held[data.draw(st.integers(0, len(self.held) - 1))]
            self.pool.allocator.shrink(extent, data.draw(st.integers(1, extent.size)))

    @rule()
    def defragment(self):
        self.pool.defragment([e for e, _ in self.held])
        free = self.pool.allocator.free_rows
        if free:
            whole = self.pool.allocator.allocate(free)
            assert whole is not None
            self.pool.allocator.free(whole)

    @invariant()
    def extents_are_disjoint_and_whole(self):
        taken = sorted((e.start, e.size) for e, _ in self.held)
        for (start, size), (following, _) in pairwise(taken):
            assert start + size <= following
        assert sum(size for _, size in taken) + self.pool.allocator.free_rows == ROWS
        for extent, mark in self.held:
            rows = slice(extent.start, extent.start + extent.size)
            nothing = torch.empty(0, dtype=torch.long)
            for layer, shape in enumerate(SHAPES):
                empty_key = torch.empty(shape.kv_heads, 0, shape.key_dim)
                empty_value = torch.empty(shape.kv_heads, 0, shape.value_dim)
                for whole in self.pool.write(layer, empty_key, empty_value, nothing):
                    assert (whole[:, rows] == mark).all()


TestAllocation = Allocation.TestCase


def test_full_pool_refuses_without_harm():
    allocator = ExtentAllocator(10)
    first = allocator.allocate(6)
    assert first is not None and allocator.allocate(5) is None
    allocator.free(first)
    assert allocator.allocate(10) is not None


@given(st.lists(st.integers(0, 15), unique=True, max_size=16), st.randoms())
def test_copy_rows_reads_before_it_writes(rows, random):
    pool = KVPool(SHAPES, 16, torch.float32, torch.device("cpu"))
    everything = torch.arange(16)
    for layer, shape in enumerate(SHAPES):
        numbered = everything[None, :, None].float()
        pool.write(
            layer,
            numbered.expand(shape.kv_heads, 16, shape.key_dim),
            numbered.expand(shape.kv_heads, 16, shape.value_dim),
            everything,
        )
    targets = random.sample(range(16), len(rows))
    pool.copy_rows(np.array(rows, np.int64), np.array(targets, np.int64))
    expected = everything.clone()
    expected[targets] = torch.tensor(rows, dtype=torch.long)
    keys, values = pool.write(1, torch.empty(1, 0, 3), torch.empty(1, 0, 5), torch.empty(0, dtype=torch.long))
    assert keys[0, :16, 0].tolist() == values[0, :16, 4].tolist() == expected.tolist()


def test_bytes_per_row_counts_all_layers():
    assert KVPool.bytes_per_row(SHAPES, torch.bfloat16) == 2 * (2 * 6 + 1 * 8 + 2 * 6)
