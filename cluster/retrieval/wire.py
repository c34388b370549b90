"""A lookup's request and answer as plain bytes, which Ray passes on at less cost than several arrays."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cluster.retrieval.lookup import LookupResult


def pack_request(queries: NDArray[np.int32], lengths: NDArray[np.int32], limits: NDArray[np.int32]) -> bytes:
    """int32 rows: length, most nodes, the query's tokens; before them the number of rows."""
    rows = np.column_stack((lengths, limits, queries)).astype(np.int32, copy=False)
    return len(queries).to_bytes(4, "little") + rows.tobytes()


def unpack_request(data: bytes) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Queries, lengths and most nodes, in memory of their own: for read-only arrays the lookup is compiled anew."""
    count = int.from_bytes(data[:4], "little")
    rows = np.frombuffer(data, np.int32, offset=4).reshape(count, -1)
    return rows[:, 2:].copy("C"), rows[:, 0].copy(), rows[:, 1].copy()


def pack_result(result: LookupResult) -> bytes:
    """int32: the number of queries, then all arrays of the result."""
    parts = (
        np.array([len(result)], np.int32),
        result.matched.astype(np.int32),
        result.totals,
        result.offsets,
        result.tokens,
        result.parents,
        result.counts,
    )
    return np.concatenate(parts).tobytes()


def unpack_result(data: bytes) -> LookupResult:
    """The result; its arrays lie in `data`."""
    flat = np.frombuffer(data, np.int32)
    queries = int(flat[0])
    bounds = np.cumsum([1, queries, queries, queries + 1])
    matched, totals, offsets = (flat[a:b] for a, b in pairwise(bounds))
    tokens, parents, counts = flat[bounds[-1] :].reshape(3, -1)
    return LookupResult(matched.astype(np.int8), totals, offsets, tokens, parents, counts)
