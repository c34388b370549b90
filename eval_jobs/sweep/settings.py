"""What a sweep is asked to do."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from cluster.decoding.params import MAX_CAPACITY
from cluster.models import EMBEDDED_NAME
from cluster.models.config import DtypeName


class SweepSettings(BaseModel):
    """Everything that decides what a generation is. A run keeps to one set; methods, tasks and repeats may be added."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = Field(EMBEDDED_NAME, description="Target model, as everywhere.")
    dtype: DtypeName = Field("auto", description="Type of weights and activations.")
    device: str = Field("auto", description="Device of each actor.")
    corpus: str | None = Field(None, description="Reference corpus to draft from.")
    retrieval: str = Field("local", description="Map the corpus in each actor, or ask its retrieval actors.")
    capacity: int | None = Field(
        None, ge=1, le=MAX_CAPACITY, description="Nodes of the draft tree; None leaves it to the method."
    )
    temperature: float = Field(0.0, ge=0.0, description="0 is greedy; else repeat r draws with seed r.")
    max_new_tokens: int = Field(128, ge=1, description="Upper bound on the tokens of an answer.")
    concurrency: int = Field(1, ge=1, description="Prompts an actor answers at once.")
    record_traces: bool = Field(False, description="Keep the best logits of every answer token, for simulation.")

    def differences(self, other: dict[str, Any]) -> list[str]:
        """What is set otherwise in another run, in words."""
        mine = self.model_dump()
        return [
            f"{name} is {other.get(name)!r} there, {mine[name]!r} here"
            for name in mine
            if mine[name] != other.get(name)
        ]
