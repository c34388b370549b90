"""What can be recorded, and that a recording does to new values what it did to the first ones."""

import pytest
import torch

from cluster.engine.gpu.capture import CudaGraphs, HostReadError, run_plainly, without_host_reads
from tests.engine.gpu.recording import record

X = torch.arange(6.0)


@pytest.mark.parametrize(
    "run",
    [
        lambda: X if X.max() > 3 else -X,
        lambda: X * X.sum().item(),
        lambda: X * int(X[2]),
        lambda: X[X > 2],
        lambda: X.clone().index_put_((X > 2,), X[:3]),
        lambda: X.nonzero(),
        lambda: X if torch.equal(X, X) else -X,
    ],
    ids=["if", "item", "int", "mask", "masked put", "nonzero", "equal"],
)
def test_looking_at_values_is_noticed(run):
    for inference in (False, True):
        with torch.inference_mode(inference), pytest.raises(HostReadError):
            without_host_reads(run)


def test_what_stays_on_the_device_passes():
    index = torch.tensor([3, 1])
    assert without_host_reads(lambda: torch.where(X[index] > 1, X[index], 0.0)).tolist() == [3.0, 0.0]


@pytest.mark.parametrize("capture", [run_plainly, record], ids=["plain", "recording"])
def test_repetitions_work_on_what_lies_in_the_inputs(capture):
    check_repetitions(capture, torch.device("cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_work_on_what_lies_in_the_inputs():
    device = torch.device("cuda")
    check_repetitions(CudaGraphs(device), device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_failed_graph_leaves_the_stream_and_later_graphs_alone():
    device = torch.device("cuda")
    graphs, stream = CudaGraphs(device), torch.cuda.current_stream()
    values = torch.ones(3, device=device)

    def reads() -> None:
        values.add_(values.sum().item())

    with pytest.raises(RuntimeError):
        graphs(reads)
    assert torch.cuda.current_stream() == stream
    check_repetitions(graphs, device)


def check_repetitions(capture, device):
    given, taken = torch.ones(3, device=device), torch.zeros(3, device=device)

    def run() -> None:
        taken.copy_((given + 1).cumsum(0) * 2)

    run()
    again = capture(run)
    for value in (5.0, -2.0):
        given.fill_(value)
        again()
        assert taken.tolist() == [2 * (value + 1) * n for n in (1, 2, 3)]
