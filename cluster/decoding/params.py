"""What a request asks for: how tokens are chosen, when to stop, how to speculate."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Method = Literal["vanilla", "pld", "rest", "logitspec", "adaptive"]
METHODS: tuple[Method, ...] = ("vanilla", "pld", "rest", "logitspec", "adaptive")
CORPUS_METHODS: frozenset[Method] = frozenset({"rest"})  # those that draft from nothing else
MAX_CAPACITY = 256  # most nodes of a draft tree that may be asked for

_SMALLEST_TEMPERATURE = 1e-5
_LARGEST_BIAS = 1000.0  # far beyond any logit, far from float32's limits

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class SamplingParams(BaseModel):
    """How the target model's logits become tokens. Names and meanings are those of vLLM and OpenAI."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_new_tokens: int = Field(128, ge=1, description="Upper bound on emitted tokens.")
    temperature: float = Field(0.0, ge=0.0, le=1000.0, description="0 is greedy; larger flattens the distribution.")
    top_k: int = Field(0, ge=0, description="Keep the k most likely tokens; 0 keeps all.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Keep the smallest set with this probability mass.")
    min_p: float = Field(0.0, ge=0.0, le=1.0, description="Drop tokens below min_p times the top probability.")
    repetition_penalty: float = Field(
        1.0, ge=0.01, le=100.0, description="Divides (or multiplies) logits of seen tokens."
    )
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0, description="Subtracted once from emitted tokens.")
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0, description="Subtracted per earlier emission.")
    logit_bias: dict[TokenId, float] = Field(default_factory=dict, description="Added to these tokens' logits.")
    min_new_tokens: int = Field(0, ge=0, description="No stop id, and no stop string, ends it before.")
    stop: tuple[str, ...] = Field((), description="Strings that end the text; they are cut from it.")
    stop_token_ids: tuple[TokenId, ...] = Field((), description="Stop ids beside the model's own.")
    ignore_eos: bool = Field(False, description="Do not stop at the model's own stop ids.")
    seed: int = Field(0, description="Noise is a function of (seed, output position) only.")
    prompt_logprobs: int | None = Field(None, ge=0, le=20, description="The same for the prompt's tokens.")
    logprobs: int | None = Field(None, ge=0, le=20, description="Report log-probabilities with this many tops.")

    @field_validator("temperature")
    @classmethod
    def _greedy_limit(cls, value: float) -> float:
        """Temperatures so small that float32 logits would overflow are the greedy limit."""
        return 0.0 if value < _SMALLEST_TEMPERATURE else value

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty")
    @classmethod
    def _finite(cls, value: float) -> float:
        if not math.isfinite(value):
            raise ValueError("must be a finite number")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> SamplingParams:
        if any(s == "" for s in self.stop):
            raise ValueError("stop strings must not be empty")
        if any(not abs(b) <= _LARGEST_BIAS for b in self.logit_bias.values()):
            raise ValueError(f"logit_bias values must lie between -{_LARGEST_BIAS:.0f} and {_LARGEST_BIAS:.0f}")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError("min_new_tokens must not exceed max_new_tokens")
        return self

    @property
    def rewrites_logits(self) -> bool:
        """True if the choice depends on more than the raw logits' argmax or temperature."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.min_new_tokens
        )


class Speculation(BaseModel):
    """How a request is drafted for. It never changes the tokens, only how many come out of a step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Method = Field("adaptive", description="Which draft sources and tree policy to use.")
    capacity: int | None = Field(
        None,
        ge=1,
        le=MAX_CAPACITY,
        description="Nodes of the draft tree, counting the root. Without it methods draft what pays, step by step: "
        "adaptive node by node, others by trees that fit the step's cost, of 8 nodes at most on a CPU and 64 on a GPU.",
    )

    @property
    def is_budgeted(self) -> bool:
        """Whether the method decides about each node by the time that it takes."""
        return self.method == "adaptive" and self.capacity is None

    @property
    def is_fitted(self) -> bool:
        """Whether the size of the method's trees is chosen for it, by the time that they take."""
        return self.method not in ("adaptive", "vanilla") and self.capacity is None

    @property
    def is_sized(self) -> bool:
        """Whether the time that steps take decides how much is drafted."""
        return self.is_budgeted or self.is_fitted
