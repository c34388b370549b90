"""A model as the HTTP side knows it: settings, tokenizer, and the way to its replicas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from cluster.models import ModelError, render_chat
from serve_app.backend import Backend
from serve_app.grammar import GrammarError
from serve_app.openai_api.errors import invalid
from serve_app.openai_api.token_texts import TokenTexts
from serve_app.openai_api.tools import tool_format
from serve_app.settings import ModelSettings

T = TypeVar("T")


@dataclass(eq=False)
class ServedModel:
    """One entry of ``/v1/models``.

    All tokenizing happens on one thread of the model's own: two must not use a tokenizer at once, and long
    texts must not hold up the event loop.
    """

    settings: ModelSettings
    tokenizer: PreTrainedTokenizerBase
    backend: Backend
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self.token_texts = TokenTexts(self.tokenizer)
        template = self.tokenizer.chat_template or ""
        self.tool_format = tool_format(template if isinstance(template, str) else " ".join(template.values()))

    @property
    def name(self) -> str:
        """The id that clients use."""
        return self.settings.served_name

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, with the tokens a text begins with."""
        return await self._run(lambda: list(self.tokenizer(text).input_ids))

    async def tokenize_inside(self, text: str) -> list[int]:
        """Token ids of a text that does not stand at the beginning."""
        return await self._run(lambda: list(self.tokenizer(text, add_special_tokens=False).input_ids))

    async def grammar(self, make: Callable[[], str]) -> str:
        """A grammar, made off the event loop: large schemas take their time.

        Raises:
            ApiError: the schema is not valid or not supported.
        """
        try:
            return await self._run(make)
        except GrammarError as error:
            raise invalid(f"Invalid schema: {str(error)[:500]}.", "response_format") from error

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included.

        Raises:
            ApiError: one of the ids is no token.
        """
        try:
            return await self._run(lambda: str(self.tokenizer.decode(list(ids))))
        except (OverflowError, TypeError) as error:
            raise invalid("The prompt holds ids that are no tokens of the model.", "prompt") from error

    async def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> list[int]:
        """Token ids of a conversation in the model's chat template.

        Raises:
            ApiError: there is no template, or it does not accept the messages.
        """
        try:
            return await self._run(lambda: render_chat(self.tokenizer, messages, **variables))
        except ModelError as error:
            raise invalid(f"{str(error)[:500]}.", "messages") from error

    async def _run(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)
