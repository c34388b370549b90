"""Keys and values of finished sequences, kept for prompts that begin alike until their memory is needed."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.engine.kv_cache import Extent


@dataclass(slots=True, eq=False)
class CachedPrefix:
    """Tokens (int32 [L]) whose keys and values fill the first L rows of an extent."""

    tokens: NDArray[np.int32]
    extent: Extent


class PrefixCache:
    """Finished prefixes in least-recently-used order."""

    def __init__(self) -> None:
        self._entries: OrderedDict[int, CachedPrefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> list[CachedPrefix]:
        """All entries, least recently used first."""
        return list(self._entries.values())

    def add(self, entry: CachedPrefix) -> None:
        """Keep an entry."""
        self._entries[id(entry)] = entry

    def touch(self, entry: CachedPrefix) -> None:
        """Mark an entry as just used."""
        self._entries.move_to_end(id(entry))

    def take(self, entry: CachedPrefix) -> Extent:
        """Remove an entry and hand over its extent."""
        return self._entries.pop(id(entry)).extent

    def pop_oldest(self) -> Extent | None:
        """Remove the least recently used entry and hand over its extent, or None if there is none."""
        return self._entries.popitem(last=False)[1].extent if self._entries else None


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Length of the longest common prefix of two token arrays."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n
