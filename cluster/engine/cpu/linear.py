"""Linear layers on weights packed once, for the few rows of a decode step.

Our own kernel computes every output by the same float32 multiply-adds in the same order, so a row's result
does not depend on how many rows are computed with it, or which: a step of width 1 and a step of width 40
agree bit for bit, and speculative decoding changes nothing even in 16-bit types. oneDNN's packed weights,
the fallback, do not promise that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from cluster.engine.cpu.kernels import BF16_PAIRS, DTYPE_CODES, Kernels, WeightPanels, load_kernels

_TRAINING = (
    "this model is optimised for inference: run it under torch.inference_mode(), "
    "or call undo() on the optimisation to train it"
)


class InferenceOnlyError(RuntimeError):
    """An optimised model was asked for something that needs its original weights."""


class FastLinear(Protocol):
    """A replacement of ``nn.Linear.forward`` that owns its weight in a layout of its own."""

    batch_invariant: bool

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] in the same dtype."""

    def unpack(self) -> Tensor:
        """The weight [N, K], bit for bit as it was given."""


class PackedWeights:
    """One or more weights of equal depth packed into one piece of memory, each usable alone or all as one.

    A float32 weight whose values all fit a 16-bit type (a checkpoint stored in bfloat16, say) is kept in that
    type: the same results from half the memory traffic.
    """

    def __init__(
        self,
        kernels: Kernels,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        *,
        alternate: bool = False,
    ) -> None:
        """Pack ``weights`` [N_i, K] (all float32, bfloat16 or float16) and ``biases`` [N_i].

        Args:
            kernels: the compiled kernels.
            weights: the matrices.
            biases: as many vectors or Nones.
            alternate: panels of the (equally large) weights take turns, instead of one weight after the other.
        """
        self.dtype = weights[0].dtype
        self._kernels = kernels
        self._rows = [len(weight) for weight in weights]
        self._depth = weights[0].shape[1]
        self._spacing = len(weights) if alternate else 1
        stored = _narrowest(weights)
        self._code = DTYPE_CODES[stored[0].dtype]
        if kernels.multiplies_pairs and self.dtype == torch.bfloat16 and self._depth % 2 == 0:
            self._code = BF16_PAIRS
        panels = [-(-rows // kernels.panel) for rows in self._rows]
        self._first = list(range(len(weights))) if alternate else [sum(panels[:i]) for i in range(len(panels))]
        self.panel_count = sum(panels)
        self.memory = _aligned_empty(self.panel_count * kernels.panel * self._depth, stored[0].dtype)
        for i, weight in enumerate(stored):
            self._move(kernels.pack, i, weight)
        self._bias = None
        if any(bias is not None for bias in biases):
            self._bias = torch.zeros(self.panel_count, kernels.panel)
            for i, bias in enumerate(biases):
                if bias is not None:
                    padded = torch.zeros(panels[i] * kernels.panel)
                    padded[: self._rows[i]] = bias.detach()
                    self._bias[self._first[i] :: self._spacing][: panels[i]] = padded.view(panels[i], -1)

    def joint(self) -> WeightPanels:
        """All panels as one weight; outputs past a weight's rows, up to a whole panel, are zero."""
        return self._fields(0, self.panel_count * self._kernels.panel, spacing=1)

    def linear(self, index: int) -> PackedLinear:
        """The layer of one of the weights."""
        return PackedLinear(self, index)

    def single(self, index: int) -> WeightPanels:
        """One of the weights, as if it were alone."""
        return self._fields(self._first[index], self._rows[index], self._spacing)

    def unpack(self, index: int) -> Tensor:
        """Weight [N_i, K], bit for bit as it was given."""
        weight = torch.empty((self._rows[index], self._depth), dtype=self.memory.dtype)
        self._move(self._kernels.unpack, index, weight)
        return weight.to(self.dtype)

    def _fields(self, first: int, rows: int, spacing: int) -> WeightPanels:
        panel = self._kernels.panel
        offset = first * panel * self._depth * self.memory.itemsize
        bias = None if self._bias is None else self._bias[first:].data_ptr()
        return WeightPanels(self.memory.data_ptr() + offset, bias, rows, self._depth, spacing, self._code)

    def _move(self, move: Callable[..., None], index: int, matrix: Tensor) -> None:
        matrix = matrix.contiguous()
        move(
            self._code, matrix.data_ptr(), *matrix.shape, self.memory.data_ptr(),
            self._first[index], self._spacing, torch.get_num_threads(),
        )  # fmt: skip


class PackedLinear:
    """A linear layer on packed weights: x [..., K] -> [..., N], float32 sums rounded once to its dtype."""

    batch_invariant = True

    def __init__(self, weights: PackedWeights, index: int = 0) -> None:
        """The layer of weight ``index``."""
        self.weights, self.index = weights, index
        self._dtype = weights.dtype
        self._fields = weights.single(index)
        self._code = DTYPE_CODES[self._dtype]
        self._linear = weights._kernels.linear
        self._in, self._out = self._fields.k, self._fields.n

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N].

        Raises:
            InferenceOnlyError: gradients are wanted, or the dtype is not the one the weight was packed for.
        """
        *leading, features = x.shape
        if x.dtype is not self._dtype or features != self._in or x.requires_grad:
            self._refuse(x)
        x = x.contiguous()
        out = torch.empty((*leading, self._out), dtype=self._dtype)
        rows = x.numel() // features
        self._linear(self._fields, self._code, x.data_ptr(), rows, out.data_ptr(), torch.get_num_threads())
        return out

    def unpack(self) -> Tensor:
        """The weight [N, K], bit for bit as it was given."""
        return self.weights.unpack(self.index)

    def _refuse(self, x: Tensor) -> None:
        if x.requires_grad:
            raise InferenceOnlyError(_TRAINING)
        raise InferenceOnlyError(
            f"a layer packed for [..., {self._in}] {self._dtype} got {list(x.shape)} {x.dtype}; "
            "call undo() on the optimisation before converting the model"
        )


class OneDnnLinear:
    """A linear layer on oneDNN's packed weights: needs no compiler, and makes use of bfloat16 units."""

    batch_invariant = False

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Pack ``weight`` [N, K] and ``bias`` [N], both of one dtype."""
        self._bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        if x.requires_grad:
            raise InferenceOnlyError(_TRAINING)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")

    def unpack(self) -> Tensor:
        """The weight [N, K], bit for bit as it was given."""
        return self._packed.to_dense()


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> FastLinear | None:
    """The packed form of a linear layer on this machine, or None if plain torch is the best there is.

    Args:
        weight: [N, K] on CPU.
        bias: [N] or None.
    """
    kernels = load_kernels() if weight.dtype in DTYPE_CODES else None
    if kernels is not None:
        return pack(kernels, weight, bias)
    return OneDnnLinear(weight, bias) if _onednn_packs(weight) else None


def pack(kernels: Kernels, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """A linear layer of ``weight`` [N, K] and ``bias`` [N] on our kernel."""
    return PackedWeights(kernels, [weight], [bias]).linear(0)


def _narrowest(weights: Sequence[Tensor]) -> list[Tensor]:
    """``weights``, in a 16-bit type if they are float32 and every value survives that."""
    weights = [weight.detach() for weight in weights]
    if weights[0].dtype == torch.float32:
        for narrow in (torch.bfloat16, torch.float16):
            if all(_survives(weight, narrow) for weight in weights):
                return [weight.to(narrow) for weight in weights]
    return weights


def _survives(weight: Tensor, narrow: torch.dtype, rows: int = 256) -> bool:
    """Whether every value of ``weight`` is exact in ``narrow``; a block of rows at a time, most say no at once."""
    return all(torch.equal(block.to(narrow).to(weight.dtype), block) for block in weight.split(rows))


def _aligned_empty(count: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised elements that begin at a cache line."""
    line = 64
    memory = torch.empty(count * dtype.itemsize + line, dtype=torch.uint8)
    begin = -memory.data_ptr() % line
    return memory[begin : begin + count * dtype.itemsize].view(dtype)


def _has_bf16_units() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _onednn_packs(weight: Tensor) -> bool:
    """Whether oneDNN packs this weight here and gives it back unchanged."""
    if not torch.backends.mkldnn.is_available() or weight.dtype not in (torch.float32, torch.bfloat16):
        return False
    if weight.dtype == torch.bfloat16 and not _has_bf16_units():
        return False
    try:
        sample = torch.ops.mkldnn._reorder_linear_weight(weight[:64].detach(), None)
        return torch.equal(sample.to_dense(), weight[:64])
    except RuntimeError:
        return False
