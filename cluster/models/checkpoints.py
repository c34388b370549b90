"""From a resolved source to what transformers can load: a local directory, or a hub id."""

from pathlib import Path

from cluster.models.embedded import embedded_file
from cluster.models.gguf_convert import converted_model, converted_tokenizer
from cluster.models.resolve import ModelSource, SourceKind


def model_checkpoint(source: ModelSource) -> str:
    """Directory or hub id with weights and configuration; GGUF files are converted. Raises ModelError."""
    file = _gguf_file(source)
    return str(converted_model(file)) if file else source.location


def tokenizer_checkpoint(source: ModelSource) -> str:
    """Directory or hub id with the tokenizer; of a GGUF file only that is converted. Raises ModelError."""
    file = _gguf_file(source)
    return str(converted_tokenizer(file)) if file else source.location


def _gguf_file(source: ModelSource) -> Path | None:
    if source.kind is SourceKind.EMBEDDED:
        return embedded_file()
    return Path(source.location) if source.kind is SourceKind.GGUF else None
