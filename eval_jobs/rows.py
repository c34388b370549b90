"""What a sweep writes: a row a generation, and beside it what was found out about answers afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

_TOKENS = pa.list_(pa.int32())
_COUNTS = pa.map_(pa.string(), pa.int64())
_SECONDS = pa.list_(pa.float64())

STEP_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # tokens of the steps whose times are kept

TraceKey = tuple[str, str, int]  # benchmark, question, turn


class Key(NamedTuple):
    """Names a generation within a run."""

    bench: str
    question: str
    turn: int
    method: str
    repeat: int

    @property
    def prompt(self) -> TraceKey:
        """Names the prompt that all methods are given (in a later turn, after their own answers)."""
        return self.bench, self.question, self.turn

    @property
    def conversation(self) -> tuple[str, str]:
        """Names the task."""
        return self.bench, self.question


@dataclass(slots=True)
class Row:
    """One generation: one method's answer to one turn. Times in seconds.

    Attributes:
        category, group: of the task.
        prompt_ids, output_ids, text, finish_reason: what was asked and answered.
        seconds: from the request to its last token.
        busy_seconds: the time the answer took of the device: ``seconds`` when alone, else its share, by tokens, of
            the time of the batch it was in.
        chunk_tokens: tokens that arrived together: those of the prefill first, then of each decode step.
        chunk_seconds: when they arrived, counted from the request.
        decode_steps, retrieved_steps: steps after the prefill, and those in which a query found a continuation.
        drafted, accepted: draft tokens by source.
        drafted_depths, accepted_depths: draft tokens by depth, from depth 1.
        drafted_ranks, accepted_ranks: next-next guesses by rank, from rank 1.
        part_seconds: where the time went.
        step_seconds: how long the engine expected steps of ``STEP_WIDTHS`` to take during the answer, where the method
            sized its trees by that; else empty.
        memory_bytes: peak of the device's allocations during the generation; of the process so far on a CPU.
        node, device, dtype, started: where (machine/Ray node, kind of device), in what type, when (Unix time).
        error: why there is no answer; None if there is one.
    """

    bench: str
    question: str
    turn: int
    method: str
    repeat: int
    category: str
    group: str
    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    seconds: float = 0.0
    busy_seconds: float = 0.0
    chunk_tokens: list[int] = field(default_factory=list)
    chunk_seconds: list[float] = field(default_factory=list)
    decode_steps: int = 0
    retrieved_steps: int = 0
    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    drafted_depths: list[int] = field(default_factory=list)
    accepted_depths: list[int] = field(default_factory=list)
    drafted_ranks: list[int] = field(default_factory=list)
    accepted_ranks: list[int] = field(default_factory=list)
    part_seconds: dict[str, float] = field(default_factory=dict)
    step_seconds: list[float] = field(default_factory=list)
    memory_bytes: int = 0
    node: str = ""
    device: str = ""
    dtype: str = ""
    started: float = 0.0
    error: str | None = None

    @property
    def key(self) -> Key:
        return Key(self.bench, self.question, self.turn, self.method, self.repeat)

    @property
    def step_tokens(self) -> list[int]:
        """Tokens of each decode step: the accepted ones and the step's own."""
        return self.chunk_tokens[1:]


@dataclass(slots=True)
class Trace:
    """What the target model thinks of an answer of its own, from one pass over prompt and answer.

    Attributes:
        ranks: for each answer token but the first: its rank (from 1) among the logits that chose the token before,
            that token left out: where a next-next guess would have found it. 0 beyond the ranks looked at.
        top_ids, top_logits: row by row, [len(output_ids), K]: the best ids and their raw logits that chose each
            answer token, flat; empty unless traces are recorded.
        rejected_parents, rejected_tokens, rejected_ids, rejected_gaps: what it thinks behind tokens that are not the
            answer's, as in ``rejections.Rejections``; likewise.
    """

    bench: str
    question: str
    turn: int
    group: str
    prompt_ids: list[int]
    output_ids: list[int]
    ranks: list[int]
    top_ids: list[int] = field(default_factory=list)
    top_logits: list[float] = field(default_factory=list)
    rejected_parents: list[int] = field(default_factory=list)
    rejected_tokens: list[int] = field(default_factory=list)
    rejected_ids: list[int] = field(default_factory=list)
    rejected_gaps: list[float] = field(default_factory=list)

    @property
    def key(self) -> TraceKey:
        return self.bench, self.question, self.turn


@dataclass(slots=True)
class Divergence:
    """Where an answer parts from vanilla's, and the difference of the two candidates' logits there."""

    bench: str
    question: str
    turn: int
    method: str
    repeat: int
    position: int
    gap: float

    @property
    def key(self) -> Key:
        return Key(self.bench, self.question, self.turn, self.method, self.repeat)


_KEY = [("bench", pa.string()), ("question", pa.string()), ("turn", pa.int32())]
_METHOD = [("method", pa.string()), ("repeat", pa.int32())]

ROW_SCHEMA = pa.schema(
    [
        *_KEY,
        *_METHOD,
        ("category", pa.string()),
        ("group", pa.string()),
        ("prompt_ids", _TOKENS),
        ("output_ids", _TOKENS),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("seconds", pa.float64()),
        ("busy_seconds", pa.float64()),
        ("chunk_tokens", _TOKENS),
        ("chunk_seconds", _SECONDS),
        ("decode_steps", pa.int64()),
        ("retrieved_steps", pa.int64()),
        ("drafted", _COUNTS),
        ("accepted", _COUNTS),
        ("drafted_depths", _TOKENS),
        ("accepted_depths", _TOKENS),
        ("drafted_ranks", _TOKENS),
        ("accepted_ranks", _TOKENS),
        ("part_seconds", pa.map_(pa.string(), pa.float64())),
        ("step_seconds", _SECONDS),
        ("memory_bytes", pa.int64()),
        ("node", pa.string()),
        ("device", pa.string()),
        ("dtype", pa.string()),
        ("started", pa.float64()),
        ("error", pa.string()),
    ]
)
TRACE_SCHEMA = pa.schema(
    [
        *_KEY,
        ("group", pa.string()),
        ("prompt_ids", _TOKENS),
        ("output_ids", _TOKENS),
        ("ranks", _TOKENS),
        ("top_ids", _TOKENS),
        ("top_logits", pa.list_(pa.float32())),
        ("rejected_parents", _TOKENS),
        ("rejected_tokens", _TOKENS),
        ("rejected_ids", _TOKENS),
        ("rejected_gaps", pa.list_(pa.float32())),
    ]
)
DIVERGENCE_SCHEMA = pa.schema([*_KEY, *_METHOD, ("position", pa.int32()), ("gap", pa.float64())])

Record = Row | Trace | Divergence


def to_table(records: Iterable[Record], schema: pa.Schema) -> pa.Table:
    """Records of one kind as a table of its schema."""
    return pa.Table.from_pylist([asdict(r) for r in records], schema=schema)


def from_table(table: pa.Table, kind: type[Any]) -> list[Any]:
    """The records of a table; what a file of an older run lacks stays at its default."""
    maps = {f.name for f in table.schema if pa.types.is_map(f.type)}
    return [
        kind(**{name: dict(value) if name in maps else value for name, value in row.items() if value is not None})
        for row in table.to_pylist()
    ]
