"""Token files: documents as token ids, one row each, compressed Arrow IPC."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cluster.retrieval import CorpusError
from cluster.retrieval.layout import SEPARATOR
from cluster.retrieval.storage import Location
from corpus_builder.work_files import open_arrow

_SCHEMA = pa.schema([pa.field("tokens", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False)])
_BATCH_TOKENS = 1 << 20
_KEY = b"logitspec.tokens"


@dataclass(frozen=True, slots=True)
class TokenStats:
    """What a token file holds, and what was wrong with the input it came from, by kind."""

    documents: int
    tokens: int
    largest: int
    problems: dict[str, int] = field(default_factory=dict)


def write_tokens(path: Path, documents: Sequence[NDArray[np.int32]], problems: dict[str, int]) -> TokenStats:
    """Write documents, none of them empty."""
    stats = TokenStats(
        len(documents),
        sum(len(document) for document in documents),
        max((int(document.max()) for document in documents), default=-1),
        dict(sorted(problems.items())),
    )
    text = json.dumps([stats.documents, stats.tokens, stats.largest, stats.problems])
    schema = _SCHEMA.with_metadata({_KEY: text.encode()})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema, options=options) as writer:
        for group in _groups(documents):
            offsets = np.cumsum([0, *(len(document) for document in group)]).astype(np.int32)
            values = pa.array(np.concatenate(group))
            column = pa.ListArray.from_arrays(pa.array(offsets), values, type=_SCHEMA.field(0).type)
            writer.write_batch(pa.record_batch([column], schema=schema))
    return stats


def read_stats(source: Location) -> TokenStats:
    """What a token file holds. Raises CorpusError."""
    with open_arrow(source) as reader:
        return _stats(reader, source)


def read_documents(source: Location) -> Iterator[NDArray[np.int32]]:
    """About a million tokens at a time, more where a document is longer; a separator after each document."""
    with open_arrow(source) as reader:
        _stats(reader, source)
        for number in range(reader.num_record_batches):
            column = reader.get_batch(number).column(0)
            lengths = np.diff(column.offsets.to_numpy())
            flat = np.full(len(column.values) + len(lengths), SEPARATOR, np.int32)
            flat[np.arange(len(column.values)) + np.repeat(np.arange(len(lengths)), lengths)] = column.values
            yield flat


def _groups(documents: Sequence[NDArray[np.int32]]) -> Iterator[list[NDArray[np.int32]]]:
    group: list[NDArray[np.int32]] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document)
        if size >= _BATCH_TOKENS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _stats(reader: pa.ipc.RecordBatchFileReader, source: Location) -> TokenStats:
    text = (reader.schema.metadata or {}).get(_KEY)
    if text is None:
        raise CorpusError(f"{source.text} is not a token file of a corpus")
    return TokenStats(*json.loads(text))
