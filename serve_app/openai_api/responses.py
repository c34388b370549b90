"""What clients get: OpenAI's response schemas. Only fields that are set are sent."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class ResponseModel(BaseModel):
    """Part of a response."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    def to_json(self) -> str:
        """JSON text of the fields that are set."""
        return self.model_dump_json(exclude_unset=True)


class PromptDetails(ResponseModel):
    """Where prompt tokens came from."""

    cached_tokens: int


class CompletionDetails(ResponseModel):
    """What the caller's prediction was good for."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int


class SpeculationUsage(ResponseModel):
    """What speculation did, over all answers of the request."""

    decode_steps: int
    retrieved_steps: int
    mean_accepted_tokens: float
    drafted: dict[str, int]
    accepted: dict[str, int]


class Usage(ResponseModel):
    """Tokens of a request; ``speculation`` is beyond OpenAI's API."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    speculation: SpeculationUsage


class TopLogprob(ResponseModel):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    """Log-probabilities of an answer's tokens."""

    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None


class FunctionCallOut(ResponseModel):
    """A called function and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCallOut(ResponseModel):
    """A call the model made."""

    id: str
    type: Literal["function"]
    function: FunctionCallOut


class ToolCallDelta(ToolCallOut):
    """A call in a stream."""

    index: int


class ChatMessage(ResponseModel):
    """The model's answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[ToolCallOut] = []


class ChatChoice(ResponseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(ResponseModel):
    """Response of ``POST /v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(ResponseModel):
    """What a chunk adds to an answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    tool_calls: list[ToolCallDelta] = []


class ChatChunkChoice(ResponseModel):
    """More of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(ResponseModel):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionLogprobs(ResponseModel):
    """Log-probabilities in the older format: parallel lists; the first token of an echoed prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ResponseModel):
    """One answer, whole or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(ResponseModel):
    """Response of ``POST /v1/completions``, and each event of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Model(ResponseModel):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(ResponseModel):
    """Response of ``GET /v1/models``."""

    object: Literal["list"]
    data: list[Model]


class Health(ResponseModel):
    """Response of ``GET /health``: for each model whether a replica has come up."""

    status: Literal["ok", "starting"]
    models: dict[str, bool]


class Version(ResponseModel):
    """Response of ``GET /version``."""

    version: str


class ErrorObject(ResponseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    """The body of every error."""

    error: ErrorObject
