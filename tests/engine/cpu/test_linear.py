"""The packed linear layer: right, exact about its weights, and independent of neighbouring rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.cpu.kernels import DTYPE_CODES
from cluster.engine.cpu.linear import InferenceOnlyError, OneDnnLinear, PackedWeights, pack, pack_linear

DTYPES = list(DTYPE_CODES)
SHAPES = [(16, 16), (1, 1), (17, 5), (50, 577), (96, 64), (211, 72), (320, 2100)]


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_agrees_with_float64_and_does_not_depend_on_other_rows(kernels, dtype, n, k):
    torch.manual_seed(n * k)
    weight, bias, x = (torch.randn(shape).to(dtype) for shape in ((n, k), (n,), (70, k)))
    layer = pack(kernels, weight, bias)
    whole = layer(x)
    exact = reference(x, weight, bias)
    error = (whole.double() - exact).abs()
    assert (error <= torch.finfo(dtype).eps * exact.abs() + k * torch.finfo(torch.float32).eps).all()
    for rows in range(1, 70):
        start = (rows * 13) % (71 - rows)
        assert torch.equal(layer(x[start : start + rows]), whole[start : start + rows]), rows


SIZES = st.integers(1, 130)


@given(st.sampled_from(DTYPES), SIZES, SIZES, st.integers(1, 700), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_a_row_alone_equals_the_row_among_others(kernels, dtype, n, k, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    layer = pack(kernels, torch.randn(n, k, generator=generator).to(dtype))
    x = torch.randn(rows, k, generator=generator).to(dtype)
    row = seed % rows
    assert torch.equal(layer(x)[row], layer(x[row]))


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_the_number_of_threads_changes_nothing(kernels, threads):
    torch.manual_seed(0)
    layer = pack(kernels, torch.randn(100, 300))
    x = torch.randn(90, 300)
    expected = layer(x)
    torch.set_num_threads(threads)
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_unpack_returns_the_weight_bit_for_bit(kernels, dtype, n, k):
    weight = torch.randn(n, k).to(dtype)
    weight[0, 0] = torch.inf
    assert torch.equal(pack(kernels, weight).unpack(), weight)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_a_float32_weight_that_fits_16_bits_is_stored_so_with_the_same_results(kernels, stored):
    torch.manual_seed(0)
    weight = (torch.randn(64, 96) / 8).to(stored).to(torch.float32)
    narrow = pack(kernels, weight)
    assert narrow.weights.memory.dtype == stored
    assert torch.equal(narrow.unpack(), weight)
    fine = weight.clone()
    fine[-1, -1] += 1e-6  # now one value does not fit; the other rows stay comparable
    x = torch.randn(9, 96)
    assert torch.equal(narrow(x)[:, :-1], pack(kernels, fine)(x)[:, :-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_reach_the_output_and_only_their_row(kernels, dtype):
    layer = pack(kernels, torch.rand(40, 24).to(dtype) + 1)
    x = torch.ones(5, 24).to(dtype)
    expected = layer(x)[0]
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    y = layer(x)
    assert y[1].isnan().all()
    assert (y[2] == torch.inf).all()
    assert all(torch.equal(y[i], expected) for i in (0, 3, 4))


def test_16_bit_outputs_are_rounded_to_nearest_even(kernels):
    one = torch.ones(1, 2, dtype=torch.bfloat16)
    weight = torch.tensor([[1, 2.0**-8], [1, 3 * 2.0**-8], [1, 2.0**-8 + 2.0**-15]])
    y = pack(kernels, weight.bfloat16())(one)[0].float()
    assert y.tolist() == [1.0, 1.015625, 1.0078125]


def test_leading_dimensions_and_strides_do_not_matter(kernels):
    layer = pack(kernels, torch.randn(20, 12))
    x = torch.randn(3, 12, 5).transpose(1, 2)
    assert layer(x).shape == (3, 5, 20)
    assert torch.equal(layer(x), layer(x.reshape(15, 12)).view(3, 5, 20))
    assert layer(x[:0]).shape == (0, 5, 20)


def test_misuse_is_refused(kernels):
    layer = pack(kernels, torch.randn(20, 12))
    with pytest.raises(InferenceOnlyError, match="undo"):
        layer(torch.randn(2, 12, dtype=torch.bfloat16))
    with pytest.raises(InferenceOnlyError, match="undo"):
        layer(torch.randn(2, 13))
    with pytest.raises(InferenceOnlyError, match="inference_mode"):
        layer(torch.randn(2, 12, requires_grad=True))


def test_onednn_fallback_is_right_and_keeps_the_weight():
    weight, bias, x = torch.randn(50, 33), torch.randn(50), torch.randn(2, 7, 33)
    layer = OneDnnLinear(weight, bias)
    assert torch.allclose(layer(x), torch.nn.functional.linear(x, weight, bias), atol=1e-4)
    assert torch.equal(layer.unpack(), weight)


def test_a_dtype_the_kernels_do_not_know_is_left_alone():
    assert pack_linear(torch.randn(4, 4, dtype=torch.float64)) is None


@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_packed_together_act_as_if_alone(kernels, dtype, alternate):
    torch.manual_seed(0)
    sizes = (50, 50) if alternate else (50, 16, 7)
    weights = [torch.randn(n, 40).to(dtype) for n in sizes]
    biases = [torch.randn(n).to(dtype) if i != 1 else None for i, n in enumerate(sizes)]
    together = PackedWeights(kernels, weights, biases, alternate=alternate)
    x = torch.randn(9, 40).to(dtype)
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        assert torch.equal(together.linear(i)(x), pack(kernels, weight, bias)(x))
        assert torch.equal(together.unpack(i), weight)
