"""Ranking logits: the order of a stable sort, for every dtype."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.decoding.ranking import Ranking


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(st.integers(0, 10**6), st.integers(1, 200), st.integers(1, 300), st.booleans())
def test_order_is_that_of_a_stable_sort(dtype: torch.dtype, seed: int, count: int, vocabulary: int, coarse: bool):
    logits = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(seed)) * 4
    if coarse:  # many equal values
        logits = logits.round()
    logits = (logits + 0.0).to(dtype)
    if vocabulary > 1:
        logits[0, vocabulary // 2] = -torch.inf
    ranked = Ranking(logits).best(count)
    values, ids = torch.sort(logits.float(), descending=True, stable=True)
    kept = min(count, vocabulary)
    nonzero = logits.abs().min() > 0 or not (torch.signbit(logits) & (logits == 0)).any()  # -0.0 ranks below 0.0
    if nonzero:
        assert ranked.ids.tolist() == ids[:, :kept].tolist()
    assert ranked.gaps.shape == (3, kept)
    assert torch.equal(torch.from_numpy(ranked.gaps), (values[:, :1].to(dtype) - values[:, :kept].to(dtype)).float())


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 60), st.booleans())
def test_the_way_of_other_devices_gives_the_same(seed: int, count: int, vocabulary: int, coarse: bool):
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(seed)) * 4
    if coarse:
        logits = logits.round() + 0.0
    kept = min(count, vocabulary)
    ranking = Ranking(logits.double(), deepest=count)  # of a type that the CPU's way does not know
    first, ranked = ranking.best(1), ranking.best(count)
    values, ids = torch.sort(logits, descending=True, stable=True)
    gaps = values[:, :1] - values[:, :kept]
    torch.testing.assert_close(torch.from_numpy(ranked.gaps), gaps)
    for row in range(4):
        sure = gaps[row] < gaps[row, -1] if kept < vocabulary else torch.ones(kept, dtype=torch.bool)
        assert ranked.ids[row][sure.numpy()].tolist() == ids[row, :kept][sure].tolist()
    assert first.ids.tolist() == ranked.ids[:, :1].tolist()
    assert ranking.best(count, [2, 0]).ids.tolist() == ranked.ids[[2, 0]].tolist()
    assert Ranking(logits.double()).best(1).ids[:, 0].tolist() == ids[:, 0].tolist()


def test_first_is_argmax_for_wide_rows():
    logits = torch.randn(5, 50_000, generator=torch.Generator().manual_seed(1))
    ranking = Ranking(logits)
    ranked = ranking.best(60)
    assert ranking.best(9, [3, 1]).ids.tolist() == ranked.ids[[3, 1], :9].tolist()
    assert ranked.ids[:, 0].tolist() == logits.argmax(-1).tolist()
    assert ranked.ids.tolist() == torch.topk(logits, 60).indices.tolist()
