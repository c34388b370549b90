from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cluster.decoding.ngram_index import MAX_NGRAM, NgramIndex, latest_full

tokens = st.lists(st.integers(0, 2) | st.integers(65_530, 200_000), max_size=60)


def brute_force(text: list[int], key: list[int], span: int) -> tuple[int, int]:
    """The rule in words: longest suffix that occurred; its latest occurrence with span tokens behind it, or longest."""
    for n in range(min(MAX_NGRAM, len(key)), 0, -1):
        found = [p for p in range(n, len(text)) if text[p - n : p] == key[-n:]]
        full = [p for p in found if len(text) - p >= span]
        if found:
            return (max(full) if full else min(found)), n
    return -1, 0


@given(tokens, st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(1, 8))
def test_lookup_is_brute_force_search(text, key, span):
    index = NgramIndex(np.array(text, np.int32))
    assert latest_full(*index.state, np.array(key, np.int32), span) == brute_force(text, key, span)


@given(st.lists(tokens, max_size=6))
def test_extending_in_pieces_equals_building_at_once(pieces):
    whole = [t for piece in pieces for t in piece]
    grown, built = NgramIndex(np.empty(0, np.int32)), NgramIndex(np.array(whole, np.int32))
    for piece in pieces:
        grown.extend(np.array(piece, np.int32))
    assert grown.tokens.tolist() == built.tokens.tolist() == whole
    for n in range(1, MAX_NGRAM + 1):
        for p in range(n, len(whole)):
            key = np.array(whole[p - n : p], np.int32)
            assert latest_full(*grown.state, key, 3) == latest_full(*built.state, key, 3)
