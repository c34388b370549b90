"""What can be compared: our engine's methods and Hugging Face ``generate``, all behind one call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers.generation.streamers import BaseStreamer

from cluster.decoding.params import METHODS, Method, SamplingParams, Speculation
from cluster.engine import Engine, Request
from cluster.models import LoadedModel

HF_SYSTEMS = ("hf", "hf_pld")
SYSTEMS = (*HF_SYSTEMS, *METHODS)


@dataclass(frozen=True, slots=True)
class Generation:
    """One system's answer to one prompt.

    Attributes:
        token_ids: emitted tokens.
        seconds: wall time of the whole generation, prefill included.
        decode_steps: forward passes after the prefill that emitted tokens.
        retrieved_steps: those in which a query found a continuation.
        part_seconds: where the time went; empty for systems that do not say.
        chunk_tokens, chunk_seconds: tokens that came out together, and when, from the start; empty likewise.
        drafted, accepted: draft tokens by source; empty likewise.
    """

    token_ids: list[int]
    seconds: float
    decode_steps: int
    retrieved_steps: int = 0
    part_seconds: dict[str, float] = field(default_factory=dict)
    chunk_tokens: list[int] = field(default_factory=list)
    chunk_seconds: list[float] = field(default_factory=list)
    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)


class System(Protocol):
    """Something that answers a prompt."""

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> Generation:
        """Answer one prompt of token ids."""
        ...


class EngineSystem:
    """A method of our engine, alone in the batch."""

    def __init__(self, engine: Engine, method: Method, capacity: int | None) -> None:
        self._engine = engine
        self._speculation = Speculation(method=method, capacity=capacity)

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> Generation:
        before = self._engine.stats.stopwatch.seconds
        start = time.perf_counter()
        (output,) = self._engine.generate([Request(prompt, params, self._speculation)])
        seconds = time.perf_counter() - start
        after = self._engine.stats.stopwatch.seconds
        parts = {part: after[part] - before[part] for part in after}
        stats = output.stats
        return Generation(
            output.token_ids,
            seconds,
            stats.decode_steps,
            stats.retrieved_steps,
            parts,
            drafted=dict(stats.drafted),
            accepted=dict(stats.accepted),
        )


class HuggingFaceSystem:
    """``generate`` of transformers, with its own prompt lookup if ``lookup`` is set. Its noise is not ours."""

    def __init__(self, loaded: LoadedModel, lookup: int | None = None) -> None:
        self._loaded = loaded
        self._options = {} if lookup is None else {"prompt_lookup_num_tokens": lookup}
        self._calls = 0
        loaded.model.register_forward_hook(self._count)

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> Generation:
        ids = torch.tensor([list(prompt)], device=self._loaded.device)
        self._calls = 0
        clock = _Clock()
        with torch.inference_mode():
            torch.manual_seed(params.seed)
            out = self._loaded.model.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=params.max_new_tokens,
                eos_token_id=sorted(self._loaded.stop_ids),
                pad_token_id=min(self._loaded.stop_ids),
                streamer=clock,
                **_choice(params),
                **self._options,
            )
        seconds = time.perf_counter() - clock.start
        return Generation(
            out[0, ids.shape[1] :].tolist(),
            seconds,
            self._calls - 1,
            chunk_tokens=clock.tokens,
            chunk_seconds=clock.seconds,
        )

    def _count(self, *_: object) -> None:
        self._calls += 1


def _choice(params: SamplingParams) -> dict[str, Any]:
    """How ``generate`` shall choose tokens; explicit, as a model's generation config has defaults of its own."""
    if not params.temperature:
        return {"do_sample": False, "repetition_penalty": params.repetition_penalty}
    return {
        "do_sample": True,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "repetition_penalty": params.repetition_penalty,
    }


class _Clock(BaseStreamer):
    """Notes when tokens arrive. The first thing it is given is the prompt."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.tokens: list[int] = []
        self.seconds: list[float] = []
        self._seen_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._seen_prompt:
            self.tokens.append(value.numel())
            self.seconds.append(time.perf_counter() - self.start)
        self._seen_prompt = True

    def end(self) -> None:
        """Nothing is left to note."""
