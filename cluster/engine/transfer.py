"""Bringing small arrays to the model's device without waiting for it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def pinned_bytes(size: int, device: torch.device) -> Tensor:
    """uint8 [size] of host memory from which copies to ``device`` are asynchronous; not initialised.

    torch hands pinned memory out again only when the copies from it are done: take a new block for each step.
    """
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor on ``device``; the host goes on meanwhile. On a CPU the memory is shared."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
