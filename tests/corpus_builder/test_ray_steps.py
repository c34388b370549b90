"""Connecting to Ray: whatever keeps it from coming up is told in one line."""

import pytest
import ray

from cluster.retrieval import CorpusError
from corpus_builder.ray_steps import ray_session


@pytest.mark.parametrize("kind", [Exception, RuntimeError, ConnectionError, TimeoutError])
def test_a_ray_that_does_not_come_up(kind: type[Exception], monkeypatch: pytest.MonkeyPatch):
    def fail(**_: object) -> None:
        raise kind("the node\ntimed out")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(CorpusError, match="this machine: the node timed out"), ray_session(None, 1):
        pass
