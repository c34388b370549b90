"""Tree attention: right against float64, and the same bits however the same keys are presented."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.cpu import TreeStep, tree_attention
from cluster.engine.cpu.kernels import DTYPE_CODES

DTYPES = list(DTYPE_CODES)


def relation(parents: list[int]) -> np.ndarray:
    """bool [W, W] ancestors-or-self of a tree given by parent indices (-1: root)."""
    seen = np.eye(len(parents), dtype=np.bool_)
    for i, parent in enumerate(parents):
        if parent >= 0:
            seen[i] |= seen[parent]
    return seen


def random_tree(rng: np.random.Generator, width: int) -> list[int]:
    return [-1] + [int(rng.integers(max(0, i - 6), i)) for i in range(1, width)]


def reference(query, keys, values, visible, scale, softcap=None):
    """[T, H, D] in float64; visible: for each query its pool rows."""
    tokens, heads, dim = query.shape
    kv_heads, rows = keys.shape[:2]
    grouped = query.double().view(tokens, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("thgd,hnd->thgn", grouped, keys.double()) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = torch.zeros(tokens, rows, dtype=torch.bool)
    for t, own in enumerate(visible):
        seen[t, own] = True
    weights = torch.softmax(scores.masked_fill(~seen[:, None, None], -torch.inf), -1)
    return torch.einsum("thgn,hnd->thgd", weights, values.double()).reshape(tokens, heads, -1)


def visible_rows(starts, lengths, trees, window=None):
    result = []
    for start, length, tree in zip(starts, lengths, trees, strict=True):
        for path in (np.flatnonzero(row) for row in tree):
            rows = np.concatenate([np.arange(length), length + path])
            result.append(start + rows[-window:] if window else start + rows)
    return result


def pools(rng, kv_heads, rows, dims, dtype):
    make = torch.Generator().manual_seed(int(rng.integers(2**31)))
    return [torch.randn(kv_heads, rows, dim, generator=make).to(dtype) for dim in dims]


@given(
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(0, 330), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (9, 3), (4, 4), (8, 1), (60, 1)]),
    dims=st.sampled_from([(64, 64), (16, 32), (12, 12), (20, 7), (128, 128)]),
    window=st.sampled_from([None, 1, 5, 64, 100, 300]),
    softcap=st.sampled_from([None, 3.0]),
)
@settings(max_examples=30, deadline=None)
def test_agrees_with_float64(kernels, dtype, seed, lengths, heads, dims, window, softcap):
    rng = np.random.default_rng(seed)
    widths = rng.integers(1, 40, len(lengths))
    trees = [relation(random_tree(rng, w)) for w in widths]
    trees[0] = np.tri(widths[0], dtype=np.bool_)
    ancestors = [None, *trees[1:]]
    gaps = rng.integers(0, 5, len(lengths))
    ends = np.cumsum(np.asarray(lengths) + widths + gaps)
    starts = ends - np.asarray(lengths) - widths
    keys, values = pools(rng, heads[1], int(ends[-1]), dims, dtype)
    query = torch.randn(int(widths.sum()), heads[0], dims[0], generator=torch.Generator().manual_seed(seed)).to(dtype)
    scale = dims[0] ** -0.5
    out = tree_attention(
        query, keys, values, starts, lengths, widths, ancestors, scale=scale, window=window, softcap=softcap
    )
    visible = visible_rows(starts, lengths, trees, window)
    expected = reference(query, keys, values, visible, scale, softcap)
    error = (out.double() - expected).abs()
    allowed = torch.finfo(dtype).eps * expected.abs() + 2e-5
    if dtype == torch.bfloat16 and kernels.multiplies_pairs:  # the weights are rounded as well
        allowed += torch.finfo(dtype).eps * reference(query, keys, values.abs(), visible, scale, softcap)
    assert (error <= allowed).all()


def as_chain(keys, values, rows, dtype):
    """A pool in which the keys at ``rows`` are a sequence's tokens in order."""
    return keys[:, rows].contiguous(), values[:, rows].contiguous()


@given(
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
    length=st.integers(0, 600),
    width=st.integers(1, 48),
    window=st.sampled_from([None, 9, 130]),
    dim=st.sampled_from([64, 12]),
)
@settings(max_examples=30, deadline=None)
def test_a_node_gets_the_bits_it_would_get_alone_with_its_path_committed(
    kernels, dtype, seed, length, width, window, dim
):
    rng = np.random.default_rng(seed)
    tree = relation(random_tree(rng, width))
    keys, values = pools(rng, 3, length + width + 5, (dim, dim), dtype)
    query = torch.randn(width, 9, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)
    options: dict[str, Any] = {"scale": dim**-0.5, "window": window}
    whole = tree_attention(query, keys, values, [5], [length], [width], [tree], **options)
    for node in {0, width - 1, int(rng.integers(width))}:
        rows = visible_rows([5], [length], [tree])[node]
        own_keys, own_values = as_chain(keys, values, rows, dtype)
        for committed in {len(rows) - 1, max(0, len(rows) - 3), len(rows) // 2}:
            step = len(rows) - committed
            queries = query[[node] * step]
            alone = tree_attention(queries, own_keys, own_values, [0], [committed], [step], **options)
            assert torch.equal(alone[-1], whole[node])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_threads_and_neighbours_change_nothing(kernels, threads, dtype):
    rng = np.random.default_rng(0)
    starts, lengths, widths = [0, 800, 1000], [700, 3, 40], [20, 1, 60]
    trees = [relation(random_tree(rng, 20)), None, None]
    keys, values = pools(rng, 3, 1100, (64, 64), dtype)
    query = torch.randn(81, 9, 64).to(dtype)
    parts = [
        tree_attention(query[a:b], keys, values, [starts[s]], [lengths[s]], [widths[s]], [trees[s]], scale=0.125)
        for s, (a, b) in enumerate([(0, 20), (20, 21), (21, 81)])
    ]
    torch.set_num_threads(threads)
    whole = tree_attention(query, keys, values, starts, lengths, widths, trees, scale=0.125)
    again = tree_attention(query[:20], keys, values, starts[:1], lengths[:1], widths[:1], trees[:1], scale=0.125)
    assert torch.equal(again, parts[0])
    assert torch.equal(whole, torch.cat(parts))


def test_new_keys_are_stored_before_they_are_read(kernels):
    rng = np.random.default_rng(0)
    keys, values = pools(rng, 2, 90, (16, 16), torch.bfloat16)
    starts, lengths, widths = [2, 50], [30, 0], [7, 4]
    step = TreeStep(starts, lengths, widths, [relation(random_tree(rng, 7)), None])
    query = torch.randn(11, 4, 16).bfloat16()
    new_keys, new_values = (torch.randn(2, 11, 16).bfloat16().transpose(0, 1) for _ in range(2))
    stored = keys.clone(), values.clone()
    for pool, new in zip(stored, (new_keys, new_values), strict=True):
        pool[:, torch.from_numpy(step.rows())] = new.transpose(0, 1)
    out = step.attend(query, keys, values, scale=0.25, new_keys=new_keys, new_values=new_values)
    assert torch.equal(keys, stored[0])
    assert torch.equal(values, stored[1])
    assert torch.equal(out, step.attend(query, *stored, scale=0.25))
    assert step.positions().tolist()[7:] == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_a_query_does_not_see_cannot_reach_it(kernels, dtype):
    rng = np.random.default_rng(0)
    tree = relation([-1, 0, 0, 1, 2, 2])
    keys, values = pools(rng, 1, 60, (16, 16), dtype)
    query = torch.randn(6, 2, 16).to(dtype)
    options: dict[str, Any] = {"scale": 0.25, "window": 20}
    clean = tree_attention(query, keys, values, [10], [40], [6], [tree], **options)
    for pool in (keys, values):
        pool[:, :10] = torch.nan  # before the sequence
        pool[:, 10 : 10 + 21] = torch.nan  # outside every window, the last one beside a key that is seen
        pool[:, 56:] = torch.nan  # behind the sequence
        pool[:, 10 + 40 + 2] = torch.nan  # node 2: seen by 2, 4 and 5
    out = tree_attention(query, keys, values, [10], [40], [6], [tree], **options)
    assert torch.equal(out[[0, 1, 3]], clean[[0, 1, 3]])
    assert out[[2, 4, 5]].isnan().all()


@pytest.mark.parametrize("layout", ["heads_first", "tokens_first"])
def test_strided_queries_and_pools(kernels, layout):
    torch.manual_seed(0)
    query = torch.randn(3, 4, 16) if layout == "tokens_first" else torch.randn(4, 3, 16).transpose(0, 1)
    stack = torch.randn(5, 2, 30, 16)
    out = torch.zeros(3, 4, 16)
    got = tree_attention(query, stack[1], stack[3], [4], [20], [3], scale=0.25, out=out)
    assert got is out
    expected = tree_attention(query.contiguous(), stack[1].clone(), stack[3].clone(), [4], [20], [3], scale=0.25)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    "bad",
    [
        relation([-1, 0, 1]).T,  # children before parents
        np.zeros((3, 3), np.bool_),  # not even itself
        np.array([[1, 0, 0], [1, 1, 0], [0, 1, 1]], np.bool_),  # a grandparent forgotten
        np.array([[1, 0, 0], [0, 1, 0], [1, 1, 1]], np.bool_),  # two parents
    ],
)
def test_what_is_no_tree_is_refused(kernels, bad):
    with pytest.raises(ValueError, match="sequence 1"):
        TreeStep([0, 9], [1, 1], [2, 3], [None, bad])


def test_layouts_that_do_not_fit_are_refused(kernels):
    with pytest.raises(ValueError, match="negative"):
        TreeStep([0], [-1], [1])
    with pytest.raises(ValueError, match="one length"):
        TreeStep([0], [1, 2], [1])
    with pytest.raises(ValueError, match="width is 2"):
        TreeStep([0], [1], [2], [np.eye(3, dtype=np.bool_)])
    step = TreeStep([0], [5], [2])
    pool, query = torch.randn(2, 7, 16), torch.randn(2, 4, 16)
    for bad in (
        (query[:1], pool, pool),
        (query, pool[:, :6], pool[:, :6]),
        (query, pool.bfloat16(), pool),
        (query[:, :3], pool, pool),
        (query[..., :8], pool, pool),
    ):
        with pytest.raises(ValueError, match="7 pool rows"):
            step.attend(*bad, scale=1.0)
    with pytest.raises(ValueError, match="last dimension"):
        step.attend(query.transpose(0, 2).contiguous().transpose(0, 2), pool, pool, scale=1.0)
