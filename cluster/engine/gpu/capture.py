"""Recording what a step does to its device, to do it again without the Python that said so.

A recorded run reads and writes the same memory each time; what it is to work on is put there before. So it must not
look at values on the host on its way: it would go on as it went the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Run = Callable[[], None]
_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


class HostReadError(RuntimeError):
    """A run that depends on values of device tensors in Python, and so cannot be recorded."""


class Capture(Protocol):
    """A way to make a run repeatable."""

    def __call__(self, run: Run) -> Run:
        """Something that does to the device what ``run`` does, whose tensors stay where they are.

        ``run`` has been called once before.
        """
        ...


def run_plainly(run: Run) -> Run:
    """Nothing is recorded: each repetition runs the Python again."""
    return run


class CudaGraphs:
    """Records CUDA graphs. They share memory for what they compute on their way, as only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        """Record ``run``; the graph is launched on the stream that is current when it is replayed.

        Raises:
            RuntimeError: it does something that a graph cannot.
        """
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                run()  # what libraries set up at a stream's first use is not to be recorded
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # The outer context: where recording fails, torch leaves the recording stream the current one.
            # thread_local: what other threads do meanwhile with their devices does not spoil the recording.
            with (
                torch.cuda.stream(current),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                run()
        return graph.replay


def capture_for(device: torch.device) -> Capture:
    """CUDA graphs on a GPU; elsewhere plain calls, with the same shapes, buffers and masks."""
    return CudaGraphs(device) if device.type == "cuda" else run_plainly


def without_host_reads(run: Callable[[], Tensor]) -> Tensor:
    """Call ``run``.

    Raises:
        HostReadError: it looked at values of tensors, or made a tensor whose size depends on them.
    """
    with _NoHostReads():
        return run()


class _NoHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _reads(func, args):
            raise HostReadError(f"{func} takes values to the host")
        return func(*args, **(kwargs or {}))


def _reads(func: Any, args: Any) -> bool:
    if func is torch.ops.aten.is_nonzero.default:  # what `if tensor:` calls; it has no tag
        return True
    if func in _INDEXING:  # reads only what masks choose, whose number is not known beforehand
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))
