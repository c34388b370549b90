"""What a build is asked to do, and how it is to run."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from cluster.retrieval.manifest import BuildParameters

Kind = Literal["parquet", "jsonl", "json", "text", "lines", "arrow"]  # of input files


class Execution(BaseModel):
    """How a build runs; none of it changes the corpus."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    parallelism: int | None = Field(None, ge=1, description="workers; None: one for each core here")
    memory_mb: int = Field(2000, ge=800, description="bound for each worker process")
    ray_address: str | None = Field(None, description="cluster to run on; None: $RAY_ADDRESS, else this machine")

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.parallelism or os.cpu_count() or 1


class BuildRequest(BaseModel):
    """What to build.

    `inputs` are files, directories and URIs; `fields` and `kind` are found by name where None; `shards` None
    means as many as memory asks for.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    inputs: tuple[str, ...] = Field(min_length=1)
    out: str
    tokenizer: str
    fields: tuple[str, ...] | None = None
    kind: Kind | None = None
    shards: int | None = Field(None, ge=1, le=100_000)
    parameters: BuildParameters = BuildParameters()
    keep_tokens: bool = True
    overwrite: bool = False
