"""The KV pool: one preallocated tensor a layer shape, cut into contiguous extents, one a sequence."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cluster.engine.transfer import upload

_MOVE_CHUNK = 1024  # rows copied at a time, which bounds the temporary memory of a move


@dataclass(slots=True)
class Extent:
    """Pool rows [start, start + size) that belong to one sequence."""

    start: int
    size: int


@dataclass(frozen=True, slots=True)
class LayerShape:
    """KV heads and head sizes of one layer."""

    kv_heads: int
    key_dim: int
    value_dim: int


class KVStore(Protocol):
    """Where attention puts a step's keys and values, and where it reads all of them from."""

    def write(self, layer: int, key: Tensor, value: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Store key and value [kv_heads, T, dim] in ``rows`` (int64 [T]) of a layer; returns what to attend to."""
        ...

    def pools(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's whole tensors, for code that stores by itself."""
        ...


class ExtentAllocator:
    """First-fit allocation of contiguous row ranges. Free ranges are kept sorted and merged."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free: list[tuple[int, int]] = [(0, capacity)] if capacity else []

    @property
    def free_rows(self) -> int:
        """Rows not allocated, however scattered."""
        return sum(size for _, size in self._free)

    def allocate(self, size: int) -> Extent | None:
        """A new extent, or None if no free range is large enough."""
        for i, (start, room) in enumerate(self._free):
            if room >= size:
                self._free[i : i + 1] = [(start + size, room - size)] if room > size else []
                return Extent(start, size)
        return None

    def grow(self, extent: Extent, size: int) -> bool:
        """Enlarge ``extent`` in place to ``size`` rows; False if the rows behind it are taken."""
        extra, end = size - extent.size, extent.start + extent.size
        for i, (start, room) in enumerate(self._free):
            if start == end and room >= extra:
                self._free[i : i + 1] = [(end + extra, room - extra)] if room > extra else []
                extent.size = size
                return True
        return False

    def shrink(self, extent: Extent, size: int) -> None:
        """Give back the rows of ``extent`` beyond ``size``."""
        if size < extent.size:
            self._release(extent.start + size, extent.size - size)
            extent.size = size

    def free(self, extent: Extent) -> None:
        """Give back a whole extent."""
        self._release(extent.start, extent.size)
        extent.size = 0

    def pack(self, extents: Sequence[Extent]) -> list[tuple[int, Extent]]:
        """Move all allocated ``extents`` to the front; returns (old start, extent), in the order to copy them."""
        moved, at = [], 0
        for extent in sorted((e for e in extents if e.size), key=lambda e: e.start):
            if extent.start != at:
                moved.append((extent.start, extent))
                extent.start = at
            at += extent.size
        self._free = [(at, self.capacity - at)] if at < self.capacity else []
        return moved

    def _release(self, start: int, size: int) -> None:
        if not size:
            return
        insort(self._free, (start, size))
        merged: list[tuple[int, int]] = []
        for begin, room in self._free:
            if merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((begin, room))
        self._free = merged


class KVPool:
    """Keys and values of all sequences, for all layers.

    Layers of equal shape share one tensor [layers, kv_heads, rows, dim] for keys and one for values, so that moving
    rows (compaction, prefix copies) is one indexed copy a tensor, over all layers at once.
    """

    def __init__(self, shapes: Sequence[LayerShape], rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate ``rows`` rows and a spare one; ``shapes[i]`` is layer i's shape."""
        self.allocator = ExtentAllocator(rows)
        self.spare_row = rows  # no sequence's: what is written there is read by none
        self._stacks: list[Tensor] = []
        self._layers: list[tuple[Tensor, Tensor]] = [None] * len(shapes)  # type: ignore[list-item]
        for shape in dict.fromkeys(shapes):
            members = [i for i, s in enumerate(shapes) if s == shape]
            keys, values = (
                torch.empty((len(members), shape.kv_heads, rows + 1, dim), dtype=dtype, device=device)
                for dim in (shape.key_dim, shape.value_dim)
            )
            self._stacks += [keys, values]
            for n, i in enumerate(members):
                self._layers[i] = (keys[n], values[n])

    @staticmethod
    def bytes_per_row(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
        """Bytes that one token's keys and values take over all layers."""
        return sum(s.kv_heads * (s.key_dim + s.value_dim) for s in shapes) * dtype.itemsize

    def pools(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys [kv_heads, rows, key_dim] and values [kv_heads, rows, value_dim] of a layer."""
        return self._layers[layer]

    def write(self, layer: int, key: Tensor, value: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Store key and value [kv_heads, T, dim] in ``rows`` (int64 [T]) of a layer; returns its whole tensors."""
        keys, values = self._layers[layer]
        keys.index_copy_(1, rows, key)
        values.index_copy_(1, rows, value)
        return keys, values

    def copy_rows(self, source: np.ndarray, destination: np.ndarray) -> None:
        """Copy rows ``source`` to rows ``destination`` (int64 [n]; overlap is fine) in every layer."""
        if not len(source):
            return
        src, dst = upload(np.stack((source, destination)), self._stacks[0].device)
        for stack in self._stacks:
            stack.index_copy_(2, dst, stack.index_select(2, src))

    def move(self, source: int, destination: int, rows: int) -> None:
        """Copy a range of rows to another place; the two may overlap if the copy goes towards the front."""
        for at in range(0, rows, _MOVE_CHUNK):
            n = min(_MOVE_CHUNK, rows - at)
            for stack in self._stacks:
                chunk = stack[:, :, source + at : source + at + n].clone()
                stack[:, :, destination + at : destination + at + n] = chunk

    def defragment(self, extents: Sequence[Extent]) -> None:
        """Slide all allocated extents to the front so that the free rows are one range."""
        for old_start, extent in self.allocator.pack(extents):
            self.move(old_start, extent.start, extent.size)


class ShapeProbe:
    """A store that keeps nothing but notes each layer's shape: whatever a config calls them, the model knows."""

    def __init__(self) -> None:
        self._shapes: dict[int, LayerShape] = {}

    def write(self, layer: int, key: Tensor, value: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Note the shape; the new keys and values are all there is to attend to."""
        self._shapes[layer] = LayerShape(key.shape[0], key.shape[2], value.shape[2])
        return key, value

    def pools(self, layer: int) -> tuple[Tensor, Tensor]:
        """There are none."""
        raise NotImplementedError("layers that store keys and values by themselves cannot be probed")

    def shapes(self) -> list[LayerShape]:
        """Shapes by layer index."""
        return [self._shapes[i] for i in sorted(self._shapes)]
