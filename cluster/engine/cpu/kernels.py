"""The compiled kernels as Python functions (ctypes)."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p

import torch

from cluster.engine.cpu.build import BuildError, load_library

logger = logging.getLogger(__name__)

DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Element types the kernels know, with their code in the C interface."""

BF16_PAIRS = 3
"""Code of bfloat16 weights in the order of the processor's dot product of pairs."""


def _strided(name: str, *axes: str) -> list[tuple[str, type]]:
    """The fields of a tensor: its address, and a stride for each of its axes but the last."""
    return [(name, c_void_p), *((f"{name}_{axis}", c_int64) for axis in axes)]


class WeightPanels(Structure):
    """``struct PackedWeight`` of gemm.h: a weight in panels, with its bias."""

    _fields_ = [
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("spacing", c_int64),
        ("dtype", c_int64),
    ]


class StepPlan(Structure):
    """``struct Step`` of plan.h: what the queries of a step see."""

    _fields_ = [
        ("sequences", c_int64),
        ("tokens", c_int64),
        *((name, c_void_p) for name in ("starts", "lengths", "widths", "first", "trunk", "depth", "tail", "nodes")),
    ]


class AttentionCall(Structure):
    """``struct Attention`` of attention.h: the tensors of one call; strides count elements."""

    _fields_ = [
        *_strided("query", "token", "head"),
        *_strided("keys", "head", "row"),
        *_strided("values", "head", "row"),
        *_strided("new_keys", "token", "head"),
        *_strided("new_values", "token", "head"),
        ("out", c_void_p),
        ("out_token", c_int64),
        *((name, c_int64) for name in ("heads", "kv_heads", "key_dim", "value_dim", "window")),
        ("scale", c_float),
        ("softcap", c_float),
        ("dtype", c_int32),
    ]


class NormFields(Structure):
    """``struct Norm`` of layer.h; a null weight means no norm."""

    _fields_ = [("weight", c_void_p), ("eps", c_float), ("late", c_int32)]


class LayerFields(Structure):
    """``struct Layer`` of layer.h: a decoder layer."""

    _fields_ = [
        *((n, c_int64) for n in ("hidden", "intermediate", "heads", "kv_heads", "key_dim", "value_dim", "window")),
        ("scale", c_float),
        ("softcap", c_float),
        ("dtype", c_int32),
        ("activation", c_int32),
        *((n, WeightPanels) for n in ("qkv", "out", "gate_up", "down")),
        *((n, NormFields) for n in ("input", "query", "key", "attention_post", "mlp_input", "mlp_post")),
    ]


class LayerCall(Structure):
    """``struct LayerCall`` of layer.h: what a decoder layer is applied to."""

    _fields_ = [
        *((n, c_void_p) for n in ("x", "y", "cosines", "sines", "keys", "values")),
        *((n, c_int64) for n in ("keys_head", "keys_row", "values_head", "values_row")),
    ]


class Kernels:
    """Typed entry points of the compiled library; pointers are to contiguous memory of the stated type."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.panel: int = library.ls_panel()
        """Outputs in a panel of packed weights."""
        self.multiplies_pairs = bool(library.ls_multiplies_pairs())
        """Whether bfloat16 weights may be kept in pairs (``BF16_PAIRS``)."""
        self.pack = library.ls_pack
        self.unpack = library.ls_unpack
        for move in (self.pack, self.unpack):
            move.argtypes = [c_int, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_int]
            move.restype = None
        self.linear = library.ls_linear
        self.linear.argtypes = [POINTER(WeightPanels), c_int, c_void_p, c_int64, c_void_p, c_int]
        self.linear.restype = None
        self.plan = library.ls_plan
        self.plan.argtypes = [POINTER(StepPlan), c_void_p, c_void_p]
        self.plan.restype = c_int64
        self.attention = library.ls_attention
        self.attention.argtypes = [POINTER(AttentionCall), POINTER(StepPlan), c_int]
        self.attention.restype = None
        self.layers = library.ls_layers
        self.layers.argtypes = [c_void_p, c_void_p, c_int64, POINTER(StepPlan), c_int]
        self.layers.restype = None


_lock = threading.Lock()


def load_kernels() -> Kernels | None:
    """The kernels, compiled on first use; None (and one warning) where that is not possible."""
    with _lock:
        return _load_once()


@functools.cache
def _load_once() -> Kernels | None:
    try:
        return Kernels(load_library())
    except BuildError as error:
        logger.warning("CPU kernels are not available, falling back to torch: %s", error)
        return None


def available() -> bool:
    """Whether the compiled CPU kernels can be used in this process."""
    return load_kernels() is not None
