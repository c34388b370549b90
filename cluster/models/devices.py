"""Choosing the device and the number type a model runs in."""

import torch

from cluster.models.config import DtypeName
from cluster.models.errors import ModelError


def choose_device(name: str) -> torch.device:
    """The torch device for a setting; `auto` is the current GPU, else the CPU.

    Raises ModelError for a name torch does not know and for a GPU this machine or torch build does not have.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        _require_gpu(device)
    return device


def choose_dtype(name: DtypeName, device: torch.device) -> torch.dtype:
    """The torch dtype for a setting; `auto` is bfloat16 where the device computes in it, else float32."""
    if name == "auto":
        return torch.bfloat16 if has_native_bfloat16(device) else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def has_native_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 in hardware, so that it is the faster type there."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def _require_gpu(device: torch.device) -> None:
    count = torch.cuda.device_count()
    if count == 0:
        raise ModelError("there is no GPU that torch can use here; set device to cpu or auto")
    if device.index is not None and device.index >= count:
        raise ModelError(f"there is no GPU {device.index}: torch sees {count}, numbered from 0")
