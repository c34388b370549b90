"""The answers of a harvest: one JSON line a prompt, appended as they come, so that a kill loses none."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from cluster.retrieval import CorpusError

ANSWERS_NAME = "answers.jsonl"
_NOTE_NAME = "harvest.json"  # how the answers were given


class AnswerFile:
    """Rows with at least a ``prompt``, by which an answer is found again."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path = path
        self._file = file
        self.prompts = {row["prompt"] for row in self.rows()}

    def belong_to(self, settings: dict[str, Any]) -> None:
        """Note how these answers are given, or check that they were given so. Raises CorpusError."""
        note = self.path.with_name(_NOTE_NAME)
        text = json.dumps(settings, indent=1)
        if not self.prompts:
            note.write_text(text)
        elif not note.exists() or note.read_text() != text:
            raise CorpusError(
                f"{self.path.parent} holds answers of another model or other settings; name another directory"
            )

    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows, in the order of the file. Raises CorpusError."""
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            try:
                row = json.loads(line)
                hash(row["prompt"])  # it is what an answer is found by
            except (ValueError, TypeError, KeyError):
                raise CorpusError(f"{self.path}, line {number} is no answer of a harvest; remove that line") from None
            yield row

    def append(self, row: dict[str, Any]) -> None:
        """Add a row; it is in the file when this returns."""
        self._file.write(_line(row))
        self._file.flush()
        self.prompts.add(row["prompt"])

    def sort(self, order: Mapping[str, int]) -> None:
        """Replace the file by one whose rows have their prompts in this order, others behind them; nothing can be
        appended after that.
        """
        rows = sorted(self.rows(), key=lambda row: order.get(row["prompt"], len(order)))
        part = self.path.with_name(f".{self.path.name}.tmp")
        part.write_bytes(b"".join(map(_line, rows)))
        part.replace(self.path)


@contextmanager
def open_answers(directory: Path) -> Iterator[AnswerFile]:
    """The answers in a directory, for this process alone, less a line that a kill cut short. Raises CorpusError."""
    path = directory / ANSWERS_NAME
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory), path.open("a+b") as file:
            _drop_torn_line(file)
            yield AnswerFile(path, file)
    except OSError as error:
        raise CorpusError(f"cannot write to {directory}: {error.strerror or error}") from error


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise CorpusError(f"another harvest is writing to {directory}; wait for it or name another directory") from None
    finally:
        os.close(handle)


def _drop_torn_line(file: IO[bytes]) -> None:
    file.seek(0)
    whole = sum(len(line) for line in file if line.endswith(b"\n"))
    file.truncate(whole)


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"
