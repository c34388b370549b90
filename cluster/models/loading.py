"""Loading a target model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from cluster.models.chat import end_of_turn_ids
from cluster.models.checkpoints import model_checkpoint
from cluster.models.config import ModelConfig
from cluster.models.devices import choose_device, choose_dtype
from cluster.models.errors import ModelError
from cluster.models.failures import explained
from cluster.models.resolve import resolve
from cluster.models.support import check_supported
from cluster.models.tokenizer import hub_options, tokenizer_of


@dataclass(frozen=True)
class LoadedModel:
    """A target model ready to run.

    `model` is in eval mode on `device`, its weights in `dtype`; `stop_ids` are the tokens that end an answer;
    `max_model_len` is the number of positions, prompt and answer together.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stop_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device
    max_model_len: int


def load_model(config: ModelConfig) -> LoadedModel:
    """Find, check and load a model with its tokenizer.

    Raises ModelError when it is not found, damaged, does not fit, or is of an architecture that cannot be
    verified in a tree, which is said before any weight is read.
    """
    source = resolve(config.model)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    checkpoint = model_checkpoint(source)
    options = hub_options(source, config.trust_remote_code, config.revision)
    with explained(source.name):
        model_config = AutoConfig.from_pretrained(checkpoint, **options)
        check_supported(model_config, source.name, trust_remote_code=config.trust_remote_code)
    tokenizer = tokenizer_of(source, checkpoint, config.trust_remote_code, config.revision)
    max_model_len = _max_model_len(model_config, source.name)
    with explained(source.name):
        model = _read_weights(checkpoint, model_config, dtype, device, options)
    stop_ids = _stop_ids(model, tokenizer)
    return LoadedModel(source.name, model, tokenizer, stop_ids, dtype, device, max_model_len)


def _read_weights(
    checkpoint: str,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    options: dict[str, Any],
) -> PreTrainedModel:
    # A device map makes transformers read the weights straight to a GPU, never to the CPU first.
    placement = {} if device.type == "cpu" else {"device_map": {"": device}}
    with _no_progress_bars():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint,
            config=config,
            dtype=dtype,
            attn_implementation="sdpa",
            output_loading_info=True,
            **placement,
            **options,
        )
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"checkpoint {checkpoint} is incomplete: it lacks {len(missing)} tensors, such as {missing[0]}"
        )
    return model.eval()


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ends of an answer, as the generation config, the tokenizer and the chat template name them."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = set(configured) if isinstance(configured, list) else {configured}
    ids |= {tokenizer.eos_token_id} | end_of_turn_ids(tokenizer)
    return frozenset(index for index in ids if index is not None)


def _max_model_len(config: PretrainedConfig, name: str) -> int:
    length = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise ModelError(f"the configuration of {name} does not say how many positions it has")
    return length


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """transformers' progress bars off for a while: loading is quick, and they garble servers' logs."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
