"""What can be set about a serving application: the arguments of ``serve_app:build``."""

from __future__ import annotations

import os
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cluster.decoding.params import CORPUS_METHODS, Method
from cluster.engine import EngineConfig
from cluster.models import ModelConfig
from cluster.models.config import DtypeName
from cluster.retrieval.client import Mode, RetrievalConfig

API_KEYS_VARIABLE = "LOGITSPEC_API_KEYS"
_ENGINE_DEFAULTS = EngineConfig.model_validate({})
_MODEL_DEFAULTS = ModelConfig()


class ModelSettings(BaseModel):
    """One target model and the replicas that run it."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = Field(
        default=_MODEL_DEFAULTS.model,
        min_length=1,
        description="The embedded model's name, a directory, a .gguf file, or a hub id (owner/name).",
    )
    name: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="What clients call the model. Not set: the last part of `model`, without .gguf.",
    )
    dtype: DtypeName = Field(default=_MODEL_DEFAULTS.dtype, description="Type of the weights and activations.")
    device: str = Field(
        default=_MODEL_DEFAULTS.device,
        description="cpu, cuda, cuda:N, or auto: a GPU where there is one, else the CPU.",
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a hub model.")
    trust_remote_code: bool = Field(default=False, description="Allow running the model's own Python code.")
    method: Method = Field(default="adaptive", description="How to draft where the request does not say.")
    capacity: int | None = Field(
        default=None,
        ge=1,
        le=256,
        description="Nodes of the draft tree, the root counted, where the request does not say; without it adaptive "
        "drafts what pays and other methods take what suits the device.",
    )
    corpus: str | None = Field(
        default=None, min_length=1, description="Directory or URI of a reference corpus to draft from."
    )
    retrieval: Mode = Field(
        default="local",
        description="local: each replica maps the corpus. actors: Ray actors hold its shards. auto: both, by node.",
    )
    retrieval_deadline_ms: float = Field(
        default=25.0, gt=0, description="Most that a step waits for retrieval actors; then it goes on without them."
    )
    kv_cache_gib: float = Field(
        default=_ENGINE_DEFAULTS.kv_cache_gib,
        gt=0,
        description="Memory for keys and values in each replica, GiB.",
    )
    max_sequences: int = Field(
        default=_ENGINE_DEFAULTS.max_sequences,
        ge=1,
        description="Sequences a replica runs at once; more wait.",
    )
    max_step_tokens: int = Field(
        default=_ENGINE_DEFAULTS.max_step_tokens,
        ge=1,
        description="Prompt tokens computed in a step when nothing decodes.",
    )
    prefill_chunk: int | None = Field(
        default=None,
        ge=1,
        description="Prompt tokens computed in a step beside running streams. Not set: as many as keep it within two "
        "and a half times its length without them.",
    )
    prefix_reuse: bool = Field(
        default=True, description="Keep finished requests' keys and values for prompts that begin alike."
    )
    max_model_len: int | None = Field(default=None, ge=2, description="Context limit below the model's own, tokens.")
    replicas: int = Field(default=1, ge=1, description="Replicas to start with, and the least when autoscaling.")
    max_replicas: int | None = Field(
        default=None, ge=1, description="Autoscale up to this many replicas. Not set: do not."
    )
    target_ongoing_requests: float | None = Field(
        default=None,
        gt=0,
        description="Autoscaling aims at this many requests a replica. Not set: max_sequences / 2.",
    )
    num_cpus: float | None = Field(
        default=None,
        gt=0,
        description="CPUs reserved for a replica, and its threads. Not set: 1 reserved, all used.",
    )
    num_gpus: float | None = Field(
        default=None,
        ge=0,
        description="GPUs reserved for a replica. Not set: 1 for cuda, and for auto where a GPU is seen.",
    )
    resources: dict[str, float] = Field(
        default_factory=dict, description="Further Ray resources of a replica, such as an accelerator type."
    )
    max_queued_requests: int = Field(
        default=64,
        ge=1,
        description="Requests that may wait for a replica in each ingress process; more get 429.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.method in CORPUS_METHODS and self.corpus is None:
            raise ValueError(f"method {self.method} drafts from a corpus; set corpus")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas ({self.max_replicas}) is below replicas ({self.replicas})")
        return self

    def retrieval_options(self) -> RetrievalConfig | None:
        """The part that reaching the corpus takes; None without one."""
        if self.corpus is None:
            return None
        return RetrievalConfig(corpus=self.corpus, mode=self.retrieval, deadline_ms=self.retrieval_deadline_ms)

    @property
    def served_name(self) -> str:
        """The id in ``/v1/models``."""
        return self.name or os.path.basename(self.model.rstrip("/")).removesuffix(".gguf") or self.model

    def model_options(self) -> ModelConfig:
        """The part that loading the model takes."""
        return ModelConfig(
            model=self.model,
            dtype=self.dtype,
            device=self.device,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
        )

    def engine_options(self) -> EngineConfig:
        """The part that the engine takes."""
        return EngineConfig(
            kv_cache_gib=self.kv_cache_gib,
            max_sequences=self.max_sequences,
            max_step_tokens=self.max_step_tokens,
            prefill_chunk=self.prefill_chunk,
            prefix_reuse=self.prefix_reuse,
            max_model_len=self.max_model_len,
        )


class Limits(BaseModel):
    """What one client may ask for, and how long it may take."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_body_bytes: int = Field(default=4 * 2**20, ge=1024, description="Largest request body; larger ones get 413.")
    max_choices: int = Field(default=128, ge=1, description="Most choices of one request: prompts times n.")
    request_timeout_s: float = Field(default=600.0, gt=0, description="A request is ended after this long: 504.")
    first_token_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="A request that has no token after this long is given up: 503 with Retry-After.",
    )
    retry_after_s: int = Field(default=1, ge=0, description="What Retry-After advises on 429 and 503, seconds.")


class ServeSettings(ModelSettings):
    """Arguments of ``serve_app:build``: one model, or several under ``models``, and what all have in common.

    With ``models``, what is set beside it holds for every model that does not set it itself.
    """

    models: list[ModelSettings] = Field(default_factory=list, description="Several models in one application.")
    limits: Limits = Field(default_factory=Limits, description="Limits of one request.")
    ingress_replicas: int = Field(default=1, ge=1, description="Processes that take HTTP requests.")
    ingress_num_cpus: float = Field(default=0.0, ge=0, description="CPUs reserved for each of them.")

    @model_validator(mode="before")
    @classmethod
    def _inherit(cls, values: Any) -> Any:
        """Fill what a model leaves out from the settings beside ``models``."""
        if not isinstance(values, dict) or not isinstance(values.get("models"), list):
            return values
        common = {key: value for key, value in values.items() if key in ModelSettings.model_fields}
        if "name" in common:
            raise ValueError("name stands beside models; give each of the models a name instead")
        models = [common | model if isinstance(model, dict) else model for model in values["models"]]
        return values | {"models": models}

    @model_validator(mode="after")
    def _distinct_names(self) -> Self:
        names = [model.served_name for model in self.served_models()]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two models are called {name!r}; give each a name of its own")
        return self

    def served_models(self) -> list[ModelSettings]:
        """The models of the application, one or several."""
        if self.models:
            return self.models
        return [ModelSettings(**{field: getattr(self, field) for field in ModelSettings.model_fields})]
