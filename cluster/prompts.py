"""Prompts from files, as the command lines take them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class PromptFileError(ValueError):
    """A prompt file that cannot be read; names the file and line."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a file: its id, its group and its user turns (one or more)."""

    id: str
    category: str
    turns: tuple[str, ...]


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Rows of a JSONL file in Spec-Bench's schema (``question_id, category, turns``), or with a ``prompt`` field.

    Args:
        path: the file.
        limit: how many rows to take, evenly spaced over the file so that every group is there; all if None.

    Raises:
        PromptFileError: the file is missing, a line is no JSON object, or a row has no prompt.
    """
    return evenly_spaced([parse_prompt(line, f"{path}, line {n}", n) for n, line in read_lines(path)], limit)


def read_lines(path: str | Path) -> list[tuple[int, str]]:
    """Lines of a prompt file with their numbers, from 1; blank ones are left out. Raises PromptFileError."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptFileError(f"cannot read prompts from {path}: {error}") from error
    found = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise PromptFileError(f"{path} holds no prompts")
    return found


def evenly_spaced(items: Sequence[T], limit: int | None) -> list[T]:
    """``limit`` of the items, evenly spaced; all if None or if there are fewer. Raises PromptFileError below 1."""
    if limit is not None and limit < 1:
        raise PromptFileError(f"the number of prompts must be at least 1, not {limit}")
    if limit is None or limit >= len(items):
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]


def parse_prompt(line: str, where: str, number: int) -> Prompt:
    """The prompt of a line; ``number`` is its id if it has none. Raises PromptFileError, which names ``where``."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptFileError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise PromptFileError(f"{where}: expected an object, found {type(row).__name__}")
    turns = [row["prompt"]] if row.get("turns") is None and "prompt" in row else row.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise PromptFileError(f"{where}: needs 'turns' (a list of strings) or 'prompt' (a string)")
    check_text("".join(turns), where)
    name, category = row.get("question_id", row.get("id")), row.get("category", "prompts")
    if not isinstance(name, str | int | None) or not isinstance(category, str):
        raise PromptFileError(f"{where}: 'question_id' must be a string or a whole number, 'category' a string")
    check_text(f"{name}{category}", where)
    return Prompt(str(number if name is None else name), category, tuple(turns))


def check_text(text: str, where: str) -> None:
    """Raise PromptFileError for half a surrogate pair, which is no character and which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptFileError(f"{where}: holds half a surrogate pair: {error}") from error
