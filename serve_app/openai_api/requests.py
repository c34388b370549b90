"""What clients may send: OpenAI's request schemas, and the extra fields of this server.

Fields that would change the answer and are not supported are left out, so that sending them is an error.
Those that concern only OpenAI's own operation (``user``, ``store``, …) are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from cluster.decoding.params import Method

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
StopStrings = Annotated[list[StopString], Field(max_length=16)]


class ApiModel(BaseModel):
    """Takes what the schema says and nothing else: no unknown fields, no strings for numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(ApiModel):
    """Options of a streamed answer."""

    include_usage: bool | None = Field(
        default=None, description="Send a last chunk with the usage of the whole request."
    )
    include_obfuscation: bool | None = Field(default=None, description="Ignored.")


class SpeculationOptions(ApiModel):
    """How to draft for this request. It never changes the text, only the speed."""

    method: Method | None = Field(default=None, description="Draft sources and tree policy.")
    capacity: Annotated[int, Field(ge=1, le=256)] | None = Field(
        default=None, description="Nodes of the draft tree, the root counted."
    )


class GenerationFields(ApiModel):
    """What both endpoints have in common."""

    model: str = Field(description="Id of the model, as listed by /v1/models.")
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[TokenKey, Bias] | None = Field(default=None, max_length=1024)
    n: Annotated[int, Field(ge=1, le=128)] | None = Field(default=None, description="How many answers to a prompt.")
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = Field(
        default=None, description="With the same seed the same request gives the same answer."
    )
    stop: StopString | StopStrings | None = Field(default=None, description="Strings that end the answer.")
    stream: bool | None = Field(default=None, description="Send the answer as server-sent events while it is made.")
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=2, description="0 is greedy. Default 1.")
    top_p: float | None = Field(default=None, ge=0, le=1)
    user: str | None = Field(default=None, description="Ignored.")
    top_k: Count | None = Field(
        default=None, description="Keep the k most likely tokens; 0 keeps all. Beyond OpenAI's API."
    )
    min_p: float | None = Field(default=None, ge=0, le=1, description="Beyond OpenAI's API.")
    repetition_penalty: float | None = Field(default=None, gt=0, le=100, description="Beyond OpenAI's API.")
    min_tokens: Count | None = Field(
        default=None, description="Do not end before this many tokens. Beyond OpenAI's API."
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = Field(
        default=None, description="Tokens that end the answer beside the model's own. Beyond OpenAI's API."
    )
    ignore_eos: bool | None = Field(default=None, description="Go on where the model would end. Beyond OpenAI's API.")
    speculation: SpeculationOptions | None = Field(default=None, description="How to draft. Beyond OpenAI's API.")


class TextPart(ApiModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class RefusalPart(ApiModel):
    """An assistant's earlier refusal."""

    type: Literal["refusal"]
    refusal: str


Content = str | Annotated[list[TextPart], Field(min_length=1, max_length=1024)]


class SystemMessage(ApiModel):
    """Instructions; ``developer`` is what newer models call it."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(ApiModel):
    """What the user says."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class FunctionCall(ApiModel):
    """A function the model called, its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(ApiModel):
    """A call the model made."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(ApiModel):
    """What the model said earlier."""

    role: Literal["assistant"]
    content: str | Annotated[list[TextPart | RefusalPart], Field(min_length=1, max_length=1024)] | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    name: str | None = None


class ToolMessage(ApiModel):
    """What a called function gave back."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage,
    Field(discriminator="role"),
]


class FunctionDefinition(ApiModel):
    """A function the model may call; ``parameters`` is a JSON schema."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(ApiModel):
    """A tool the model may use."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(ApiModel):
    """The name of a function."""

    name: str


class NamedTool(ApiModel):
    """One tool that must be used."""

    type: Literal["function"]
    function: NamedFunction


class Prediction(ApiModel):
    """Text that the answer is expected to repeat for the most part, such as the file that is to be edited."""

    type: Literal["content"]
    content: Content


class TextFormat(ApiModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(ApiModel):
    """A JSON object of any form."""

    type: Literal["json_object"]


class JsonSchema(ApiModel):
    """A JSON schema and its name."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = Field(default=None, description="Ignored: a schema is always enforced.")


class JsonSchemaFormat(ApiModel):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatCompletionRequest(GenerationFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    logprobs: bool | None = Field(default=None, description="Report the log-probabilities of the answer's tokens.")
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(default=None, description="Needs logprobs.")
    max_tokens: Positive | None = Field(default=None, description="Older name of max_completion_tokens.")
    max_completion_tokens: Positive | None = Field(default=None, description="Default: what the context has room for.")
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(default=None, description="Whether an answer may hold several calls.")
    response_format: ResponseFormat | None = Field(default=None, description="What form the answer must have.")
    prediction: Prediction | None = Field(
        default=None, description="Text that the answer is expected to repeat; drafts are taken from it."
    )
    modalities: list[Literal["text"]] | None = None
    metadata: dict[str, str] | None = Field(default=None, description="Ignored.")
    store: bool | None = Field(default=None, description="Ignored; nothing is stored.")
    service_tier: str | None = Field(default=None, description="Ignored.")
    safety_identifier: str | None = Field(default=None, description="Ignored.")
    prompt_cache_key: str | None = Field(default=None, description="Ignored.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None,
        max_length=64,
        description="Further variables for the model's chat template. Beyond OpenAI's API.",
    )
    add_generation_prompt: bool | None = Field(
        default=None, description="Open a new answer after the messages; default true. Beyond OpenAI's API."
    )
    continue_final_message: bool | None = Field(
        default=None, description="Go on with the last message instead of answering it. Beyond OpenAI's API."
    )


Prompts = (
    str
    | Annotated[list[TokenId], Field(min_length=1)]
    | Annotated[list[str], Field(min_length=1, max_length=2048)]
    | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=2048)]
)


class CompletionRequest(GenerationFields):
    """Body of ``POST /v1/completions``."""

    prompt: Prompts = Field(description="Text, texts, or token ids of one or several prompts.")
    best_of: Positive | None = Field(default=None, description="Only n answers are made; more are refused.")
    echo: bool | None = Field(default=None, description="Begin the answer with the prompt.")
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None, description="Report log-probabilities, and of this many most likely tokens."
    )
    max_tokens: Count | None = Field(default=None, description="Default 16. 0 is for echo, to score the prompt only.")
    suffix: None = Field(default=None, description="Not supported.")
