"""The directory of a run: its settings, its tasks, and tables that grow by small files and lose nothing to a kill."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from cluster.prompts import PromptFileError
from eval_jobs.benchmarks import Task
from eval_jobs.rows import (
    DIVERGENCE_SCHEMA,
    ROW_SCHEMA,
    TRACE_SCHEMA,
    Divergence,
    Row,
    Trace,
    from_table,
    to_table,
)

R = TypeVar("R", Row, Trace, Divergence)
_MOST_PARTS = 64  # small files before they are merged into one


class RunError(PromptFileError):
    """A run's directory that cannot be used as asked."""


class Table(Generic[R]):
    """Records of one kind in a directory of parquet files.

    A file appears by a rename, complete or not at all. Many small files are merged into one now and then: the merged
    one appears before they go, and a record found twice counts once, so a kill in between does no harm.
    """

    def __init__(self, directory: Path, kind: type[R], schema: pa.Schema) -> None:
        self._directory = directory
        self._kind: type[R] = kind
        self._schema = schema

    def append(self, records: Sequence[R]) -> None:
        """Write records to a file of their own; they are on disk when this returns."""
        self._write(to_table(records, self._schema), "part")
        parts = sorted(self._directory.glob("part-*.parquet"))
        if len(parts) >= _MOST_PARTS:
            self._write(pa.concat_tables([_read(p, self._schema) for p in parts]), "merged")
            for part in parts:
                part.unlink()

    def read(self) -> list[R]:
        """All records, each once, in the order of their keys.

        Raises:
            RunError: a file is damaged.
        """
        records = {}
        for file in sorted(self._directory.glob("*.parquet")):
            try:
                records.update({r.key: r for r in from_table(_read(file, self._schema), self._kind)})
            except TypeError as error:  # fields lack
                raise RunError(f"{file} is none of this table's files; remove it") from error
        return [records[key] for key in sorted(records)]

    def _write(self, table: pa.Table, name: str) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        final = self._directory / f"{name}-{uuid.uuid4().hex}.parquet"
        hidden = final.with_suffix(".tmp")
        pq.write_table(table, hidden, compression="zstd")
        os.replace(hidden, final)


def _read(file: Path, schema: pa.Schema) -> pa.Table:
    try:
        return pq.read_table(file, schema=schema)
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise RunError(f"{file} is damaged; remove it, and sweep again for what was in it: {reason}") from error


class RunDirectory:
    """A run on disk; ``name`` is what it is called, by default as its directory."""

    def __init__(self, path: str | Path, name: str | None = None) -> None:
        self.path = Path(path)
        self.name = name or self.path.resolve().name
        self.rows = Table(self.path / "rows", Row, ROW_SCHEMA)
        self.traces = Table(self.path / "traces", Trace, TRACE_SCHEMA)
        self.divergences = Table(self.path / "divergences", Divergence, DIVERGENCE_SCHEMA)

    @property
    def settings(self) -> dict[str, Any]:
        """What was asked for.

        Raises:
            RunError: there is no run.
        """
        settings = self._json("run.json")
        if not isinstance(settings, dict) or "model" not in settings:
            raise RunError(f"{self.path / 'run.json'} is damaged: no settings of a sweep in it")
        return settings

    @property
    def tasks(self) -> list[Task]:
        """The tasks asked for so far."""
        rows = self._json("tasks.json")
        try:
            return [Task.model_validate(row) for row in rows]
        except (TypeError, ValueError) as error:
            raise RunError(f"{self.path / 'tasks.json'} is damaged: {error}") from error

    @property
    def exists(self) -> bool:
        return (self.path / "run.json").exists()

    def describe(self, settings: dict[str, Any], tasks: Iterable[Task]) -> None:
        """Write the settings and add to the tasks.

        Raises:
            RunError: two tasks have the same name, or the run has other tasks of these names.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for left in self.path.glob("*/*.tmp"):  # by a process that was killed
            left.unlink()
        known = {(t.bench, t.id): t for t in self.tasks} if self.exists else {}
        new: dict[tuple[str, str], Task] = {}
        for task in tasks:
            name = task.bench, task.id
            if name in new:
                raise RunError(f"there are two questions {task.id} of {task.bench}; name the prompt files differently")
            if known.get(name, task) != task:
                raise RunError(f"{self.path} has another question {task.id} of {task.bench}; name another --out")
            new[name] = task
        known |= new
        self._write_json("tasks.json", [t.model_dump() for t in known.values()])
        self._write_json("run.json", settings)

    @property
    def step_ms_file(self) -> Path:
        """Milliseconds of a step by its width, as the first actor measured them."""
        return self.path / "step_ms.json"

    def write_step_ms(self, times: dict[int, float]) -> None:
        """Keep how long steps take."""
        self._write_json(self.step_ms_file.name, times)

    def _json(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(f"{self.path} holds no run: {error}") from error

    def _write_json(self, name: str, content: Any) -> None:
        hidden = self.path / f".{name}.tmp"
        hidden.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
        os.replace(hidden, self.path / name)


def distinct_runs(paths: Sequence[str]) -> list[RunDirectory]:
    """Runs under names that tell them apart: as much of the ends of their paths as that takes."""
    parts = [path.parts for path in dict.fromkeys(Path(path).resolve() for path in paths)]
    length = 1
    while len({p[-length:] for p in parts}) < len(parts):
        length += 1
    return [RunDirectory(Path(*p), "/".join(p[-length:])) for p in parts]
