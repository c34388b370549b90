"""``POST /v1/chat/completions``."""

from __future__ import annotations

import inspect
import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi.responses import Response
from transformers import PreTrainedTokenizerBase

from cluster.models import render_chat
from serve_app.generation import Answer, Ending, GenerationRequest, Piece
from serve_app.grammar import json_schema_grammar
from serve_app.openai_api.errors import invalid
from serve_app.openai_api.events import Generation
from serve_app.openai_api.logprobs import chat_logprobs
from serve_app.openai_api.requests import (
    AssistantMessage,
    ChatCompletionRequest,
    JsonSchemaFormat,
    NamedTool,
    RefusalPart,
    SystemMessage,
    TextFormat,
    TextPart,
    ToolMessage,
    UserMessage,
)
from serve_app.openai_api.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FinishReason,
    ToolCallDelta,
    ToolCallOut,
    Usage,
)
from serve_app.openai_api.sampling import sampling_params, speculation
from serve_app.openai_api.served_model import ServedModel
from serve_app.openai_api.sse import DONE, begun, event
from serve_app.openai_api.tools import ToolCallParser, call_grammar
from serve_app.openai_api.version import fingerprint
from serve_app.settings import Limits

# Arguments of rendering, which are none of the template's variables: padding to 10^9 tokens is one of them.
_NO_VARIABLES = {
    name
    for function in (render_chat, PreTrainedTokenizerBase.apply_chat_template)
    for name in inspect.signature(function).parameters
} - {"documents"}


async def respond(model: ServedModel, body: ChatCompletionRequest, limits: Limits) -> Response:
    """Answer a chat request, whole or as a stream.

    Raises:
        ApiError: it cannot be answered.
    """
    call = ChatCall(model, body, limits)
    generation = Generation(model, await call.generation_request(), limits, call.id)
    if body.stream:
        return await begun(call.stream(generation))
    completion = call.completion(await generation.answers(), generation.usage())
    return Response(completion.to_json(), media_type="application/json")


class ChatCall:
    """One chat request and its answers' format."""

    def __init__(self, model: ServedModel, body: ChatCompletionRequest, limits: Limits) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._body = body
        self._limits = limits
        self._tools = (body.tools or []) if body.tool_choice != "none" else []

    async def generation_request(self) -> GenerationRequest:
        """What the engine is asked.

        Raises:
            ApiError: the fields contradict each other, or the template does not accept the messages.
        """
        body = self._body
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid("top_logprobs needs logprobs to be true.", "top_logprobs")
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise invalid("Give max_completion_tokens or max_tokens, not both.", "max_tokens")
        if body.stream_options is not None and not body.stream:
            raise invalid("stream_options are for streams only.", "stream_options")
        if (body.n or 1) > self._limits.max_choices:
            raise invalid(f"At most {self._limits.max_choices} answers can be asked for at once.", "n")
        if self._tools and self._model.tool_format is None:
            raise invalid("The model's chat template has no tools, or writes calls in a way not known here.", "tools")
        bound = body.max_completion_tokens or body.max_tokens
        prompt = await self._model.render([message(m) for m in body.messages], self._template_variables())
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        return GenerationRequest(
            prompts=[prompt],
            params=sampling_params(body, bound or max(1, body.min_tokens or 0), logprobs),
            speculation=speculation(body, self._model.settings),
            choices=body.n or 1,
            unbounded=bound is None,
            stream=bool(body.stream),
            prompt_name="messages",
            prediction=await self._prediction(),
            grammar=await self._grammar(),
        )

    async def _prediction(self) -> list[int]:
        prediction = self._body.prediction
        return await self._model.tokenize_inside(content_text(prediction.content)) if prediction is not None else []

    async def _grammar(self) -> str | None:
        """What the answer must follow: a call of a function, or the response format."""
        choice, form = self._body.tool_choice, self._body.response_format
        if choice == "required" or isinstance(choice, NamedTool):
            return await self._call_grammar(choice)
        if form is None or isinstance(form, TextFormat):
            return None
        schema = form.json_schema.schema_ if isinstance(form, JsonSchemaFormat) else None
        return await self._model.grammar(lambda: json_schema_grammar(schema or {"type": "object"}))

    async def _call_grammar(self, choice: NamedTool | str) -> str:
        functions = [tool.function for tool in self._tools]
        if isinstance(choice, NamedTool):
            functions = [function for function in functions if function.name == choice.function.name]
        form = self._model.tool_format
        if not functions or form is None:
            raise invalid("tool_choice asks for a function that is not among the tools.", "tool_choice")
        tokens = self._model.tokenizer.get_added_vocab()
        return await self._model.grammar(lambda: call_grammar(functions, form, tokens))

    def _template_variables(self) -> dict[str, Any]:
        body = self._body
        variables = dict(body.chat_template_kwargs or {})
        taken = _NO_VARIABLES & variables.keys()
        if taken:
            raise invalid(f"chat_template_kwargs must not set {sorted(taken)[0]}.", "chat_template_kwargs")
        if body.add_generation_prompt is not None:
            variables["add_generation_prompt"] = body.add_generation_prompt
        if body.continue_final_message:
            if body.add_generation_prompt:
                raise invalid(
                    "continue_final_message and add_generation_prompt exclude each other.",
                    "continue_final_message",
                )
            variables["continue_final_message"] = True
        if self._tools:
            variables["tools"] = [tool.model_dump(exclude_none=True) for tool in self._tools]
        return variables

    def completion(self, answers: list[Answer], usage: Usage) -> ChatCompletion:
        """The whole response."""
        return ChatCompletion(
            id=self.id,
            object="chat.completion",
            created=self._created,
            model=self._model.name,
            system_fingerprint=fingerprint(),
            choices=[self._choice(index, answer) for index, answer in enumerate(answers)],
            usage=usage,
        )

    def _choice(self, index: int, answer: Answer) -> ChatChoice:
        assert answer.ending is not None
        said = ChatMessage(role="assistant", content=answer.text, refusal=None)
        parser = self._parser()
        if parser is not None:
            content = parser.feed(answer.text)
            rest, calls = parser.finish()
            if calls:
                content = (content + rest).strip()
                said = ChatMessage(role="assistant", content=content or None, refusal=None, tool_calls=calls)
        return ChatChoice(
            index=index,
            message=said,
            logprobs=self._logprobs(answer.logprobs),
            finish_reason="tool_calls" if said.tool_calls else finish_reason(answer.ending),
        )

    def _parser(self) -> ToolCallParser | None:
        """A parser for one answer, if there are tools."""
        if not self._tools or self._model.tool_format is None:
            return None
        names = {tool.function.name for tool in self._tools}
        return ToolCallParser(self._model.tool_format, names, parallel=self._body.parallel_tool_calls is not False)

    def _logprobs(self, rows: list[dict[int, float]] | None) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(rows or [], self._body.top_logprobs or 0, self._model.token_texts)

    async def stream(self, generation: Generation) -> AsyncGenerator[str, None]:
        """The response as events. Raises ApiError as ``Generation.pieces``."""
        options = self._body.stream_options
        with_usage = bool(options and options.include_usage)
        extra: dict[str, Any] = {"usage": None} if with_usage else {}
        parsers: dict[int, ToolCallParser | None] = {}
        async with aclosing(generation.pieces()) as batches:
            async for batch in batches:
                lines = []
                for piece in batch:
                    if piece.answer not in parsers:
                        parsers[piece.answer] = self._parser()
                        lines.append(self._chunk([self._opening(piece.answer)], **extra))
                    more = self._more(piece, parsers[piece.answer])
                    if more is not None:
                        lines.append(self._chunk([more], **extra))
                if lines:
                    yield "".join(lines)
        if with_usage:
            yield self._chunk([], usage=generation.usage())
        yield DONE

    def _opening(self, index: int) -> ChatChunkChoice:
        delta = ChatDelta(role="assistant", content="")
        return ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)

    def _more(self, piece: Piece, parser: ToolCallParser | None) -> ChatChunkChoice | None:
        """What a piece adds to its answer; None if it is all held back as the possible start of a call."""
        text, calls = piece.text, list[ToolCallOut]()
        if parser is not None:
            text = parser.feed(text)
            if piece.ending is not None:
                rest, calls = parser.finish()
                text += rest
        if not text and not piece.logprobs and piece.ending is None:
            return None
        fields: dict[str, Any] = {"content": text} if text or piece.ending is None else {}
        if calls:
            fields["tool_calls"] = [
                ToolCallDelta(index=at, id=call.id, type=call.type, function=call.function)
                for at, call in enumerate(calls)
            ]
        reason = finish_reason(piece.ending) if piece.ending is not None else None
        return ChatChunkChoice(
            index=piece.answer,
            delta=ChatDelta(**fields),
            logprobs=self._logprobs(piece.logprobs),
            finish_reason="tool_calls" if calls else reason,
        )

    def _chunk(self, choices: list[ChatChunkChoice], **extra: Any) -> str:
        chunk = ChatChunk(
            id=self.id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model.name,
            system_fingerprint=fingerprint(),
            choices=choices,
            **extra,
        )
        return event(chunk.to_json())


def finish_reason(ending: Ending) -> FinishReason:
    """OpenAI's word for how an answer ended."""
    return "length" if ending.finish_reason == "length" else "stop"


def message(source: SystemMessage | UserMessage | AssistantMessage | ToolMessage) -> dict[str, Any]:
    """A message as chat templates take it: content as one text, and only what is set."""
    fields = source.model_dump(exclude_none=True)
    content = source.content
    fields["content"] = "" if content is None else content_text(content)
    for call in fields.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return fields


def content_text(content: str | Sequence[TextPart | RefusalPart]) -> str:
    """Content as one text."""
    return content if isinstance(content, str) else "".join(_part_text(part) for part in content)


def _arguments(text: str) -> Any:
    """A call's arguments as templates take them: as an object, if they are one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _part_text(part: TextPart | RefusalPart) -> str:
    return part.text if isinstance(part, TextPart) else part.refusal
