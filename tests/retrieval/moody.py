"""A retrieval actor with moods, in a module that actors load quickly."""

from __future__ import annotations

import time
from pathlib import Path

from cluster.retrieval.actor import RetrievalActor


class Moody(RetrievalActor):
    """Takes a second for every answer while there is a file that says so."""

    def answer(self, request: bytes) -> bytes:
        if slow_file(self._directory, self._shard).exists():
            time.sleep(1.0)
        return super().answer(request)


def slow_file(directory: str | Path, shard: int) -> Path:
    """The file that makes a shard's actor slow."""
    return Path(directory) / f"slow-{shard}"
