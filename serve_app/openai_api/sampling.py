"""From a request's fields to the engine's parameters."""

from __future__ import annotations

import secrets

from pydantic import ValidationError

from cluster.decoding.params import SamplingParams, Speculation
from serve_app.openai_api.errors import invalid
from serve_app.openai_api.requests import GenerationFields
from serve_app.settings import ModelSettings

_GREEDY_BELOW = 1e-4  # colder than this the softmax would overflow, and greedy is what it tends to
_SMALLEST_TOP_P = 1e-6


def sampling_params(
    fields: GenerationFields, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None = None
) -> SamplingParams:
    """The engine's parameters.

    Args:
        fields: the request.
        max_tokens: bound on the answer's length.
        logprobs: how many most likely tokens to report at each position; None reports no log-probabilities.
        prompt_logprobs: the same for the prompt's tokens.

    Raises:
        ApiError: the fields contradict each other.
    """
    temperature = 1.0 if fields.temperature is None else fields.temperature
    try:
        return SamplingParams(
            max_new_tokens=max_tokens,
            temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
            top_k=fields.top_k or 0,
            top_p=1.0 if fields.top_p is None else max(fields.top_p, _SMALLEST_TOP_P),
            min_p=fields.min_p or 0.0,
            repetition_penalty=fields.repetition_penalty or 1.0,
            presence_penalty=fields.presence_penalty or 0.0,
            frequency_penalty=fields.frequency_penalty or 0.0,
            logit_bias={int(token): bias for token, bias in (fields.logit_bias or {}).items()},
            min_new_tokens=fields.min_tokens or 0,
            stop=_strings(fields.stop),
            stop_token_ids=tuple(fields.stop_token_ids or ()),
            ignore_eos=bool(fields.ignore_eos),
            seed=secrets.randbits(63) if fields.seed is None else fields.seed,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or None
        raise invalid(f"Invalid request: {first['msg'].removeprefix('Value error, ')}.", name) from error


def speculation(fields: GenerationFields, settings: ModelSettings) -> Speculation:
    """How to draft: as the request says, else as the model is set."""
    options = fields.speculation
    method = (options.method if options else None) or settings.method
    capacity = (options.capacity if options else None) or settings.capacity
    return Speculation(method=method, capacity=capacity)


def _strings(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)
