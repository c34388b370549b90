"""Engine settings."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class EngineConfig(BaseModel):
    """Limits and budgets of one engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kv_cache_gib: float = Field(1.0, gt=0, le=2**20, description="Memory for keys and values, GiB.")
    max_sequences: int = Field(32, ge=1, description="Sequences that run at once; more wait.")
    max_step_tokens: int = Field(512, ge=1, description="Prompt tokens computed in a step when nothing decodes.")
    prefill_chunk: int | None = Field(
        None,
        ge=1,
        description="Prompt tokens computed in a step beside decoding sequences. Not set: as many as keep it within "
        "twice its length without them, or longer where many prompts wait beside few sequences.",
    )
    prefix_reuse: bool = Field(True, description="Keep finished sequences' keys and values for later prompts.")
    max_model_len: int | None = Field(None, ge=2, description="Context limit below the model's own.")
    optimize: bool = Field(True, description="Pack the model's layers for the device, in place; same results, faster.")
    static_shapes: bool | None = Field(
        None,
        description="Run steps in few shapes, padded, each recorded at its first use and replayed as a CUDA graph "
        "(on a CPU the same without recording). None: on GPUs.",
    )
    max_graphs: int = Field(64, ge=1, description="Shapes kept recorded; the one unused for longest goes first.")
