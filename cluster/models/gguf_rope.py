"""Position encoding of a GGUF file beyond the plain base frequency, which transformers' reader leaves out."""

import math
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from cluster.models.errors import ModelError
from cluster.models.gguf_header import GgufHeader

_FACTORS = "rope_freqs.weight"
# The constants every Llama 3 checkpoint shares; only the factor differs between them.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def set_rope(config: PretrainedConfig, header: GgufHeader) -> None:
    """Write the file's frequency scaling into the configuration read from it.

    Raises ModelError for a scaling that cannot be expressed, because without it long texts go wrong silently.
    """
    scaling = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    if scaling != "none" and config.rope_parameters.get("rope_type", "default") == "default":
        raise _unknown(header, f"the {scaling!r} scaling")
    if _FACTORS in header.tensors:
        parameters = _llama3_parameters(_read_factors(header), config)
        if parameters is None:
            raise _unknown(header, "frequency factors")
        config.rope_parameters = parameters


def _read_factors(header: GgufHeader) -> np.ndarray:
    tensor = header.tensors[_FACTORS]
    start = header.data_start + tensor.offset
    return np.fromfile(header.path, dtype="<f4", count=tensor.elements, offset=start)


def _llama3_parameters(factors: np.ndarray, config: PretrainedConfig) -> dict[str, Any] | None:
    """Llama 3's rope parameters if they give exactly these factors, [head_dim / 2] float32; else None."""
    base: dict[str, Any] = dict(config.rope_parameters)
    if np.allclose(factors, 1.0):
        return base
    factor = float(factors.max())
    expected = _llama3_factors(len(factors), base["rope_theta"], factor)
    if not np.allclose(factors, expected, rtol=1e-4):
        return None
    return base | _LLAMA3 | {"rope_type": "llama3", "factor": factor}


def _llama3_factors(count: int, theta: float, factor: float) -> np.ndarray:
    """What each of the `count` frequencies is divided by: 1 for short wavelengths, `factor` for long ones.

    Between the two bounds the reciprocal goes linearly in context length / wavelength.
    """
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    wavelengths = 2 * math.pi * theta ** (np.arange(count) / count)
    turns = _LLAMA3["original_max_position_embeddings"] / wavelengths
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - smooth) / factor + smooth)


def _unknown(header: GgufHeader, what: str) -> ModelError:
    return ModelError(
        f"{header.path} uses {what} of its position encoding, which cannot be taken over; use the model's "
        "directory in Hugging Face format"
    )
