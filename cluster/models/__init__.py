"""Find and load target models and tokenizers: the embedded default, a directory, a GGUF file, the hub."""

from cluster.models.chat import render_chat
from cluster.models.config import ModelConfig
from cluster.models.errors import ModelError
from cluster.models.loading import LoadedModel, load_model
from cluster.models.resolve import EMBEDDED_NAME
from cluster.models.tokenizer import load_tokenizer, tokenizer_fingerprint

__all__ = [
    "EMBEDDED_NAME",
    "LoadedModel",
    "ModelConfig",
    "ModelError",
    "load_model",
    "load_tokenizer",
    "render_chat",
    "tokenizer_fingerprint",
]
