"""What a user can set about the target model."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


class ModelConfig(BaseModel):
    """Which target model to load, and how."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = Field(
        default="smollm2-135m-instruct",
        min_length=1,
        description="The embedded model's name, a directory, a .gguf file, or a hub id (owner/name).",
    )
    dtype: DtypeName = Field(
        default="auto",
        description="Type of the weights and activations. auto: bfloat16 where the device computes in it, "
        "else float32.",
    )
    device: str = Field(
        default="auto", description="A torch device such as cpu or cuda:0. auto: the first GPU, else the CPU."
    )
    trust_remote_code: bool = Field(
        default=False, description="Allow running the model's own Python code, where it brings any."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a hub model; only for hub ids.")
