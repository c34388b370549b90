"""From a partition of an input file to its rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cluster.retrieval import CorpusError
from cluster.retrieval.storage import Location
from corpus_builder.documents import Problem
from corpus_builder.plan import Partition, batches_of, open_batches

_CHUNK = 4 << 20
_ROWS = 256  # rows decoded at a time

Row = dict[str, Any]


def read_rows(partition: Partition, problems: Counter[str]) -> Iterator[Row]:
    """The partition's rows; text comes as str or as bytes that may not be UTF-8. Raises CorpusError."""
    file = Location.parse(partition.file)
    try:
        if partition.kind == "parquet":
            yield from _table_rows(_parquet_batches(file, partition), partition, problems)
        elif partition.kind == "arrow":
            with open_batches(file) as reader:
                columns = list(partition.columns or ())
                batches = (batch.select(columns) for batch in batches_of(reader))
                yield from _table_rows(batches, partition, problems)
        elif partition.kind == "json":
            yield from _array_rows(file, problems)
        elif partition.kind == "text":
            yield {"text": b"".join(_lines(file, partition))}
        else:
            for line in _lines(file, partition):
                row = {"text": line.rstrip(b"\r\n")} if partition.kind == "lines" else _json_row(line, problems)
                if row is not None:
                    yield row
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise CorpusError(f"cannot read {partition.file} as {partition.kind}: {reason}") from error


def _json_row(line: bytes, problems: Counter[str]) -> Row | None:
    if not line.strip():
        return None
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError:
        problems[Problem.NOT_UTF8] += 1
        text = line.decode(errors="replace")
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        problems[Problem.BAD_JSON] += 1
        return None
    return row


def _array_rows(file: Location, problems: Counter[str]) -> Iterator[Row]:
    with file.filesystem.open_input_stream(file.path, compression="detect") as stream:
        data = stream.read()
    try:
        items = json.loads(data.decode("utf-8-sig", errors="replace"))
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{file.text} is no valid JSON: {error}") from error
    if not isinstance(items, list):
        raise CorpusError(f"{file.text} is no JSON array; leave out --format, or use --format jsonl for JSON lines")
    for item in items:
        if isinstance(item, dict):
            yield item
        else:
            problems[Problem.BAD_JSON] += 1


def _lines(file: Location, partition: Partition) -> Iterator[bytes]:
    """Lines that begin in the partition, with their ends."""
    if partition.start == 0 and partition.stop is None:
        with file.filesystem.open_input_stream(file.path, compression="detect") as stream:
            yield from _split(stream, None)
        return
    with file.filesystem.open_input_file(file.path) as stream:
        if partition.start:
            stream.seek(partition.start - 1)
        left = None if partition.stop is None else partition.stop - stream.tell()
        lines = _split(stream, left)
        if partition.start:
            next(lines, None)  # it began in the partition before
        yield from lines


def _split(stream: pa.NativeFile, left: int | None) -> Iterator[bytes]:
    """Lines of a stream that begin among its next `left` bytes; None: all."""
    pending: list[bytes] = []  # the pieces of a line whose end has not come
    begun = 0  # where that line began
    at = 0
    while chunk := stream.read(_CHUNK):
        first = 0
        while (end := chunk.find(b"\n", first) + 1) > 0:
            yield b"".join([*pending, chunk[first:end]])
            pending, first = [], end
            begun = at + end
            if left is not None and begun >= left:
                return
        if first < len(chunk):
            pending.append(chunk[first:])
        at += len(chunk)
    if pending:
        yield b"".join(pending)


def _parquet_batches(file: Location, partition: Partition) -> Iterator[pa.RecordBatch]:
    with file.filesystem.open_input_file(file.path) as handle:
        parquet = pq.ParquetFile(handle, buffer_size=1 << 20)
        yield from parquet.iter_batches(
            _ROWS, row_groups=[partition.row_group], columns=list(partition.columns or ()), use_threads=False
        )


def _table_rows(batches: Iterator[pa.RecordBatch], partition: Partition, problems: Counter[str]) -> Iterator[Row]:
    """Rows start:stop of the batches."""
    stop = partition.stop
    at = 0
    for batch in batches:
        lo, hi = max(partition.start - at, 0), len(batch) if stop is None else min(stop - at, len(batch))
        at += len(batch)
        for first in range(lo, hi, _ROWS):
            yield from _decoded(batch.slice(first, min(_ROWS, hi - first)), problems)
        if stop is not None and at >= stop:
            return


def _decoded(batch: pa.RecordBatch, problems: Counter[str]) -> Iterator[Row]:
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        columns[name] = _values(_as_bytes(column), problems)
    for number in range(len(batch)):
        yield {name: values[number] for name, values in columns.items()}


def _as_bytes(column: pa.Array) -> pa.Array:
    """Text columns as bytes: files hold strings that are not UTF-8, and those must not end the build."""
    if pa.types.is_string(column.type) or pa.types.is_string_view(column.type):
        return column.cast(pa.binary())
    if pa.types.is_large_string(column.type):
        return column.cast(pa.large_binary())
    return column


def _values(column: pa.Array, problems: Counter[str]) -> list[Any]:
    try:
        return column.to_pylist()
    except (UnicodeDecodeError, pa.ArrowException, ValueError, OverflowError):
        return [_value(scalar, problems) for scalar in column]


def _value(scalar: pa.Scalar, problems: Counter[str]) -> Any:
    try:
        return scalar.as_py()
    except (UnicodeDecodeError, pa.ArrowException, ValueError, OverflowError):
        problems[Problem.BAD_ROW] += 1
        return None
