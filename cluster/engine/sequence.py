"""A request and the engine's view of it while it runs."""

from __future__ import annotations

import enum
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cluster.decoding.ngram_index import NgramIndex
from cluster.decoding.params import SamplingParams, Speculation
from cluster.decoding.prediction import Prediction
from cluster.decoding.sampling import SamplingState
from cluster.engine.detokenizer import Detokenizer
from cluster.engine.kv_cache import Extent


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"  # a stop id or a stop string
    LENGTH = "length"  # max_new_tokens or the model's context is used up
    ABORT = "abort"  # cancelled


@dataclass(slots=True)
class RequestStats:
    """What a request cost and what speculation did for it. Times are seconds.

    Attributes:
        arrived, first_token, finished: ``time.perf_counter()`` stamps, 0.0 until they happen.
        decode_steps: steps after the prefill that emitted tokens.
        decode_tokens: tokens those steps emitted (the prefill emits one more).
        drafted, accepted: draft tokens by source name.
        drafted_depths, accepted_depths: draft tokens by their depth in the tree.
        drafted_ranks, accepted_ranks: next-next guesses among the root's children by their rank, 1 the likeliest.
        retrieved_steps: decode steps in which a query found a continuation.
        cached_tokens: prompt tokens whose keys and values were reused.
        preemptions: how often the request had to give up its KV memory.
    """

    arrived: float = field(default_factory=time.perf_counter)
    first_token: float = 0.0
    finished: float = 0.0
    decode_steps: int = 0
    decode_tokens: int = 0
    retrieved_steps: int = 0
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    drafted_depths: Counter[int] = field(default_factory=Counter)
    accepted_depths: Counter[int] = field(default_factory=Counter)
    drafted_ranks: Counter[int] = field(default_factory=Counter)
    accepted_ranks: Counter[int] = field(default_factory=Counter)
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def mean_accepted_tokens(self) -> float:
        """Tokens a decode step (MAT); 1.0 for vanilla, 0.0 if there was no decode step."""
        return self.decode_tokens / self.decode_steps if self.decode_steps else 0.0

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first_token - self.arrived

    @property
    def decode_seconds(self) -> float:
        """Seconds from the first token to the last."""
        return self.finished - self.first_token


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request.

    Attributes:
        token_ids: emitted tokens, a stop id included.
        text: their text, special tokens and a matched stop string left out.
        logprobs: for each token {id: log-probability}, its own first; None unless asked for.
        prompt_logprobs: the same for each prompt token, None for the first one, which nothing predicts.
    """

    request_id: str
    prompt_tokens: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stats: RequestStats
    logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None


@dataclass(frozen=True, slots=True)
class StepDelta:
    """What one step added to one request; ``prompt_logprobs`` is set with the first, ``output`` with the last one."""

    request_id: str
    token_ids: list[int]
    text: str
    logprobs: list[dict[int, float]] | None = None
    output: RequestOutput | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's state in the engine.

    ``index`` holds prompt and emitted tokens. ``computed`` of them have their keys and values in the extent; the rest
    is pending: one token while decoding, more during prefill. ``fruitless`` counts the steps since one that drafted.
    """

    request_id: str
    prompt_tokens: int
    params: SamplingParams
    speculation: Speculation
    capacity: int
    index: NgramIndex
    sampling: SamplingState
    detokenizer: Detokenizer
    stats: RequestStats = field(default_factory=RequestStats)
    extent: Extent | None = None
    computed: int = 0
    prediction: Prediction | None = None
    prompt_logprobs: list[dict[int, float] | None] = field(default_factory=lambda: [None])
    guesses: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    gaps: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    fruitless: int = 0
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def pending(self) -> int:
        """Tokens not yet in the KV cache."""
        return len(self.index) - self.computed

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.params.max_new_tokens - self.sampling.position

    @property
    def unscored(self) -> int:
        """Prompt tokens whose log-probabilities are wanted and not there yet."""
        return self.prompt_tokens - len(self.prompt_logprobs) if self.params.prompt_logprobs is not None else 0

    @property
    def is_decoding(self) -> bool:
        """True if only the last emitted token is pending."""
        return self.pending == 1 and self.sampling.position > 0

    def to_output(self) -> RequestOutput:
        """The finished request."""
        assert self.finish_reason is not None
        return RequestOutput(
            self.request_id,
            self.prompt_tokens,
            self.output_ids,
            self.detokenizer.text,
            self.finish_reason,
            self.stats,
            self.logprobs if self.params.logprobs is not None else None,
            self.prompt_logprobs if self.params.prompt_logprobs is not None else None,
        )
