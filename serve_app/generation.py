"""What goes between the HTTP ingress and a target-model replica: one request there, events back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.decoding.params import SamplingParams, Speculation
from cluster.engine import RequestOutput


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One HTTP request for the engine: prompts with ``choices`` answers each.

    Answer j of prompt i has the index ``i * choices + j``. Answer 0 of a prompt draws with ``params.seed``,
    the others with seeds made from it.

    Attributes:
        prompts: token ids of each prompt.
        params: how tokens are chosen. ``max_new_tokens`` is replaced by what fits if ``unbounded``.
        unbounded: the caller set no bound on the answer's length.
        stream: whether pieces are wanted as they come, or all at the end.
        prompt_name: the field of the HTTP request that an error about the prompt should name.
        prediction: token ids that the answers are expected to repeat for the most part.
        grammar: what the answers must follow, as ``serve_app.grammar`` writes it.
    """

    prompts: list[list[int]]
    params: SamplingParams
    speculation: Speculation
    choices: int = 1
    unbounded: bool = False
    stream: bool = False
    prompt_name: str = "prompt"
    prediction: list[int] = field(default_factory=list)
    grammar: str | None = None


class Ending(NamedTuple):
    """How an answer ended and what it cost; the counts are those of ``RequestStats``."""

    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    decode_steps: int
    decode_tokens: int
    retrieved_steps: int
    drafted: dict[str, int]
    accepted: dict[str, int]

    @staticmethod
    def of(output: RequestOutput) -> Ending:
        """What a finished request reports."""
        stats = output.stats
        return Ending(
            finish_reason=output.finish_reason.value,
            prompt_tokens=output.prompt_tokens,
            cached_tokens=min(stats.cached_tokens, output.prompt_tokens),
            completion_tokens=len(output.token_ids),
            decode_steps=stats.decode_steps,
            decode_tokens=stats.decode_tokens,
            retrieved_steps=stats.retrieved_steps,
            drafted=dict(stats.drafted),
            accepted=dict(stats.accepted),
        )


class Piece(NamedTuple):
    """More of one answer: new text, log-probabilities of its tokens if wanted, the ending at last.

    Log-probabilities are {id: log-probability}, the token's own first; a stop token that is no text has none. Those
    of the prompt, if wanted, come with the first piece.
    """

    answer: int
    text: str
    logprobs: list[dict[int, float]] | None = None
    ending: Ending | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None


class Started(NamedTuple):
    """Sent ahead of the pieces of a request that does not stream, when its first token is there."""


class Rejected(NamedTuple):
    """The engine cannot take the request as it is; nothing follows."""

    message: str
    code: str | None = None
    param: str | None = None


Event = Piece | Started | Rejected


@dataclass(slots=True)
class Answer:
    """One whole answer, put together from its pieces."""

    text: str = ""
    logprobs: list[dict[int, float]] = field(default_factory=list)
    ending: Ending | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        self.text += piece.text
        self.logprobs += piece.logprobs or []
        self.ending = piece.ending or self.ending
        self.prompt_logprobs = piece.prompt_logprobs or self.prompt_logprobs
