"""Turning a GGUF file into a model directory in Hugging Face format, once, in the cache.

Weights are stored as float32: block-quantized values are products of a half-precision scale and small
integers, and rounding those to 16 bits would change the model.
"""

import hashlib
import logging
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, GgufConfig, PreTrainedModel

from cluster.models.cache import cache_dir, cached_directory
from cluster.models.failures import explained
from cluster.models.gguf_header import GgufHeader, read_header
from cluster.models.gguf_rope import set_rope
from cluster.models.gguf_tokenizer import build_tokenizer
from cluster.models.support import check_supported

logger = logging.getLogger(__name__)

# Part of every converted directory's name: raise it when a change here changes what is written.
_FORMAT = 1

# Control tokens that end an answer. A file names one of them; models use several.
_ANSWER_ENDS = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"}
)
_CONTROL = 3


def converted_tokenizer(path: Path) -> Path:
    """Directory with the tokenizer of a GGUF file. Raises ModelError."""
    header = read_header(path)
    return cached_directory(_cache_name(path, "tokenizer"), partial(_write_tokenizer, header))


def converted_model(path: Path) -> Path:
    """Directory with the weights (float32), configuration and tokenizer of a GGUF file. Raises ModelError."""
    header = read_header(path)
    size = torch.float32.itemsize * header.elements
    return cached_directory(_cache_name(path, "model"), partial(_write_model, header), needed_bytes=size)


def checksum(path: Path) -> str:
    """SHA-256 of a file in hexadecimal; remembered in the cache until the file's size or time changes."""
    status = path.stat()
    key = hashlib.sha256(f"{path}|{status.st_size}|{status.st_mtime_ns}".encode()).hexdigest()

    def write(directory: Path) -> None:
        with path.open("rb") as file:
            (directory / "sha256").write_text(hashlib.file_digest(file, "sha256").hexdigest())

    return (cached_directory(f"checksum-{key[:32]}", write) / "sha256").read_text()


def _cache_name(path: Path, what: str) -> str:
    return f"gguf-{checksum(path)[:32]}-{what}-v{_FORMAT}"


def _write_tokenizer(header: GgufHeader, directory: Path) -> None:
    build_tokenizer(header).save_pretrained(str(directory))


def _write_model(header: GgufHeader, directory: Path) -> None:
    logger.info("converting %s, once; the result is kept in %s", header.path, cache_dir())
    tokenizer = build_tokenizer(header)
    with explained(str(header.path)):
        model = _read_model(header)
        model.generation_config = _generation_config(header)
        model.save_pretrained(str(directory))
        tokenizer.save_pretrained(str(directory))


def _read_model(header: GgufHeader) -> PreTrainedModel:
    where = {"pretrained_model_name_or_path": str(header.path.parent), "gguf_file": header.path.name}
    config = AutoConfig.from_pretrained(**where, local_files_only=True)
    check_supported(config, str(header.path))
    set_rope(config, header)
    return AutoModelForCausalLM.from_pretrained(
        **where,
        config=config,
        local_files_only=True,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )


def _generation_config(header: GgufHeader) -> GenerationConfig:
    """Every token that ends an answer, named by the file or known by its spelling, and BOS and padding."""
    ids = {name: header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    tokens = header.metadata.get("tokenizer.ggml.tokens", [])
    kinds = header.metadata.get("tokenizer.ggml.token_type", [])
    spelled = {
        index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL and token in _ANSWER_ENDS
    }
    return GenerationConfig(
        bos_token_id=header.metadata.get("tokenizer.ggml.bos_token_id"),
        pad_token_id=header.metadata.get("tokenizer.ggml.padding_token_id"),
        eos_token_id=sorted(spelled | {index for index in ids.values() if index is not None}),
    )
