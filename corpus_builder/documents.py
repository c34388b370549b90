"""From rows to documents: which fields hold text, how chats become text, what is wrong with a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKEN_FIELD = "token_ids"  # a row that has it is a document of token ids already
CHAT_FIELDS = ("messages", "conversations", "conversation", "turns")
# Fields that are tried, in this order, when none are named: the first set that a row has.
TEXT_FIELDS = (
    ("text",),
    ("content",),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "input", "output"),
    ("question", "answer"),
    ("prompt",),
)

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
_MAX_TOKEN_ID = (1 << 31) - 2


@dataclass(frozen=True, slots=True)
class Problem:
    """Kinds of trouble in input, as counted in the manifest."""

    EMPTY = "empty_document"
    SHORT = "document_shorter_than_an_ngram"
    NULL = "null_field"
    MISSING = "missing_field"
    NOT_TEXT = "field_that_is_no_text"
    NOT_UTF8 = "bytes_that_are_not_utf8"
    BAD_JSON = "line_that_is_no_json_object"
    BAD_ROW = "unreadable_row"
    BAD_IDS = "invalid_token_ids"
    TEMPLATE = "chat_refused_by_template"
    CUT = "text_file_cut_for_its_size"
    SKIPPED = "file_of_unknown_kind"


class DocumentMaker:
    """Turns rows into documents: text, or token ids where the row holds them.

    Args:
        fields: the fields to read, joined in this order; None finds them by name in each row.
        tokenizer: renders chats with its template where it has one.
        problems: counts what is wrong, by kind.
    """

    def __init__(
        self,
        fields: Sequence[str] | None,
        tokenizer: PreTrainedTokenizerBase | None,
        problems: Counter[str],
    ) -> None:
        self._fields = tuple(fields) if fields else None
        self._tokenizer = tokenizer
        self._problems = problems

    def make(self, row: Mapping[str, Any]) -> str | NDArray[np.int32] | None:
        """The document of a row; None where there is none, which is then counted."""
        fields = self._fields or find_fields(row)
        if fields is None:
            self._problems[Problem.MISSING] += 1
            return None
        if len(fields) == 1 and _is_token_field(fields[0], row):
            return self._token_ids(row[fields[0]])
        parts = [part for name in fields if (part := self._part(name, row)) is not None]
        if not parts:
            return None
        document = _joined(parts)
        if not document:
            self._problems[Problem.EMPTY] += 1
            return None
        return document

    def _part(self, name: str, row: Mapping[str, Any]) -> str | None:
        """The text of one field."""
        if name not in row:
            self._problems[Problem.MISSING] += 1
            return None
        value = row[name]
        if value is None:
            self._problems[Problem.NULL] += 1
            return None
        text = self._text(value)
        if text is None:
            self._problems[Problem.NOT_TEXT] += 1
        return text

    def _text(self, value: Any) -> str | None:
        if isinstance(value, bytes):
            return self.decode(value)
        if isinstance(value, str):
            return self._whole(value)
        if not isinstance(value, list):
            return None
        if all(isinstance(item, str | bytes) for item in value):
            return _joined([self._text(item) or "" for item in value])
        messages = [_message(item, self._text) for item in value]
        known = [message for message in messages if message is not None]
        return self._chat(known) if known else None

    def decode(self, data: bytes) -> str:
        """Text of bytes; what is not UTF-8 becomes U+FFFD and is counted."""
        try:
            return data.decode()
        except UnicodeDecodeError:
            self._problems[Problem.NOT_UTF8] += 1
            return data.decode(errors="replace")

    def _whole(self, text: str) -> str:
        """The text without halves of surrogate pairs, which JSON can spell and no tokenizer takes."""
        try:
            text.encode()
        except UnicodeEncodeError:
            self._problems[Problem.NOT_UTF8] += 1
            return text.encode(errors="replace").decode()
        return text

    def _chat(self, messages: list[dict[str, str]]) -> str:
        """A conversation as the model sees it; its turns, one under the other, if the template refuses it."""
        if self._tokenizer is not None and self._tokenizer.chat_template:
            try:
                return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
            except (TemplateError, TypeError, KeyError, ValueError, AttributeError, IndexError):
                self._problems[Problem.TEMPLATE] += 1
        return _joined([message["content"] for message in messages])

    def _token_ids(self, value: Any) -> NDArray[np.int32] | None:
        if value is None:
            self._problems[Problem.NULL] += 1
            return None
        if value == []:
            self._problems[Problem.EMPTY] += 1
            return None
        if not isinstance(value, list) or not all(isinstance(t, int) and 0 <= t <= _MAX_TOKEN_ID for t in value):
            self._problems[Problem.BAD_IDS] += 1
            return None
        return np.array(value, np.int32)


def find_fields(row: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The fields of a row that hold its document, by their names."""
    for name in (TOKEN_FIELD, *CHAT_FIELDS):
        if name in row:
            return (name,)
    for names in TEXT_FIELDS:
        if all(name in row for name in names):
            return names
    return None


def _is_token_field(name: str, row: Mapping[str, Any]) -> bool:
    if name == TOKEN_FIELD:
        return name in row
    value = row.get(name)
    return name not in CHAT_FIELDS and isinstance(value, list) and len(value) > 0 and isinstance(value[0], int)


def _joined(parts: Sequence[str]) -> str:
    """Parts one under the other; no line is left between where a part ends in white space already."""
    out: list[str] = []
    for part in parts:
        if out and out[-1] and part and not out[-1][-1].isspace():
            out.append("\n")
        out.append(part)
    return "".join(out)


def _message(item: Any, text: Any) -> dict[str, str] | None:
    """A turn of a chat as role and content, in OpenAI's shape or ShareGPT's; None for anything else."""
    if not isinstance(item, Mapping):
        return None
    role = item.get("role", item.get("from"))
    content = item.get("content", item.get("value"))
    if isinstance(content, list):  # content parts
        content = "".join(text(part.get("text")) or "" for part in content if isinstance(part, Mapping))
    elif isinstance(content, str | bytes):
        content = text(content)
    if isinstance(role, str | bytes):
        role = text(role)
    if not isinstance(role, str) or not isinstance(content, str):
        return None
    return {"role": _ROLES.get(role, role), "content": content}
