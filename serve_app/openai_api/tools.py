"""Function calls in a model's text: which form its chat template teaches, and finding them, in streams as well."""

from __future__ import annotations

import enum
import json
import uuid
from collections.abc import Collection, Sequence
from typing import Any

from serve_app.grammar import json_schema_grammar, tagged_call_grammar
from serve_app.openai_api.requests import FunctionDefinition
from serve_app.openai_api.responses import FunctionCallOut, ToolCallOut

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class ToolFormat(enum.Enum):
    """How calls are written."""

    TAGS = "tags"  # <tool_call>{"name": …, "arguments": …}</tool_call>, one after the other: Hermes, Qwen
    JSON = "json"  # the whole answer is one such object or a list of them: Llama 3, Mistral


_ARGUMENTS = {ToolFormat.TAGS: "arguments", ToolFormat.JSON: "parameters"}


def tool_format(template: str) -> ToolFormat | None:
    """The form that a chat template teaches; None if it has no tools or writes calls in a way not known here.

    Mistral's and Llama's marks are special tokens, which are not part of the text: JSON is what is left.
    """
    if "tools" not in template:
        return None
    if _OPEN in template:
        return ToolFormat.TAGS
    if "[TOOL_CALLS]" in template or "<|python_tag|>" in template or '"parameters"' in template:
        return ToolFormat.JSON
    return None


def call_grammar(tools: Sequence[FunctionDefinition], form: ToolFormat, tokens: Collection[str]) -> str:
    """The grammar of a call of one of the functions; ``tokens`` are the tokenizer's.

    Raises:
        GrammarError: a function's parameters are no schema that is supported.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, _ARGUMENTS[form]: tool.parameters or {"type": "object"}},
            "required": ["name", _ARGUMENTS[form]],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    grammar = json_schema_grammar({"anyOf": calls})
    return grammar if form is ToolFormat.JSON else tagged_call_grammar({"anyOf": calls}, _OPEN, _CLOSE, tokens)


class ToolCallParser:
    """Splits the text of one answer into content and calls.

    Text is given out as content as soon as it cannot be part of a call any more. What looks like a call but is not
    one of a known function is content.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], *, parallel: bool) -> None:
        """``names`` are the functions there are; without ``parallel`` only the first call counts."""
        self._form = form
        self._names = names
        self._parallel = parallel
        self._held = ""
        self._is_call = False

    def feed(self, text: str) -> str:
        """Take more text; returns content that is certain."""
        self._held += text
        if self._is_call:
            return ""
        certain = self._certain()
        content, self._held = self._held[:certain], self._held[certain:]
        return content

    def finish(self) -> tuple[str, list[ToolCallOut]]:
        """No more text comes: content that was held back, and the calls."""
        calls, content = self._parse(self._held)
        return content, calls if self._parallel else calls[:1]

    def _certain(self) -> int:
        """Length of the start of the held text that is no call; notes where a call begins."""
        if self._form is ToolFormat.JSON:
            begun = self._held.lstrip()
            self._is_call = begun[:1] in ("{", "[")
            # Content stays content: a bracket later in the text begins no call.
            if begun and not self._is_call:
                self._form = ToolFormat.TAGS
                return self._certain()
            return 0
        at = self._held.find(_OPEN)
        if at >= 0:
            self._is_call = True
            return at
        kept = next((n for n in range(len(_OPEN) - 1, 0, -1) if self._held.endswith(_OPEN[:n])), 0)
        return len(self._held) - kept

    def _parse(self, text: str) -> tuple[list[ToolCallOut], str]:
        if self._form is ToolFormat.JSON:
            calls = self._calls(text)
            return calls, "" if calls else text
        found: list[ToolCallOut] = []
        content = ""
        head, *parts = text.split(_OPEN)
        content += head
        for part in parts:
            inside, _, behind = part.partition(_CLOSE)
            calls = self._calls(inside)
            found += calls
            content += behind.strip() if calls else _OPEN + part
        return found, content

    def _calls(self, text: str) -> list[ToolCallOut]:
        """The calls that a JSON text holds; none if it is anything else."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return []
        rows = value if isinstance(value, list) else [value]
        calls = [self._call(row) for row in rows]
        return [call for call in calls if call is not None] if all(calls) else []

    def _call(self, row: Any) -> ToolCallOut | None:
        if not isinstance(row, dict) or row.get("name") not in self._names:
            return None
        arguments = row.get("arguments", row.get("parameters", {}))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return ToolCallOut(
            id=f"call_{uuid.uuid4().hex[:24]}",
            type="function",
            function=FunctionCallOut(name=row["name"], arguments=text),
        )
