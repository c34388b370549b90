"""What to read: input files, cut into partitions that do not depend on parallelism (docs/corpus.md §5)."""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from pydantic import BaseModel, ConfigDict

from cluster.retrieval import CorpusError
from cluster.retrieval.storage import Location
from corpus_builder.documents import Problem, find_fields
from corpus_builder.requests import Kind

PARTITION_BYTES = 8 << 20
TEXT_BYTES = 128 << 20  # a text file up to this size is one document
_JSON_ARRAY_BYTES = 256 << 20
_COMPRESSED = {".gz", ".bz2", ".zst", ".lz4", ".br"}
_KINDS: dict[str, Kind] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".rst": "text",
}


class Partition(BaseModel):
    """A part of an input file that becomes one token file.

    `start` and `stop` are rows for parquet and Arrow (within `row_group` if there is one), bytes otherwise;
    `stop` None means the end. `columns` are those of the file to read, None for files without a schema.
    """

    model_config = ConfigDict(frozen=True)

    file: str
    kind: Kind
    row_group: int | None = None
    columns: tuple[str, ...] | None = None
    start: int = 0
    stop: int | None = None


class Plan(BaseModel):
    """All partitions in order, what identifies their files, and what finding them ran into."""

    model_config = ConfigDict(frozen=True)

    partitions: tuple[Partition, ...]
    files: dict[str, tuple[int, int | None]]  # size and time of modification (ns) by name
    problems: dict[str, int]


def make_plan(inputs: Sequence[str], kind: Kind | None, fields: Sequence[str] | None) -> Plan:
    """Cut all inputs (files, directories, saved data sets, URIs) into partitions. Raises CorpusError."""
    problems: Counter[str] = Counter()
    files: dict[str, tuple[int, int | None]] = {}
    partitions: list[Partition] = []
    for name in inputs:
        for location, info, found in _files(Location.parse(name), kind, problems):
            files[location.text] = (info.size, info.mtime_ns)
            try:
                partitions += _cut(location, info.size, found, fields, problems)
            except (pa.ArrowException, OSError) as error:
                raise CorpusError(f"cannot read {location.text} as {found}: {_line(error)}") from error
    if not partitions:
        raise CorpusError(
            f"there is nothing to read in {', '.join(inputs)}; known files are {', '.join(_KINDS)} "
            "(also compressed), and --format names the kind of others"
        )
    return Plan(partitions=tuple(partitions), files=files, problems=dict(problems))


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _files(
    location: Location, kind: Kind | None, problems: Counter[str]
) -> Iterator[tuple[Location, fs.FileInfo, Kind]]:
    """The files of one input, in the order of their names."""
    info = location.info()
    if info.type == fs.FileType.File:
        yield location, info, kind or _kind_of(info.base_name) or "text"
    elif info.type == fs.FileType.Directory:
        data_set = list(_data_set_files(location))
        if data_set:
            yield from ((file, file.info(), "arrow") for file in data_set)
        else:
            yield from _directory_files(location, kind, problems)
    else:
        raise CorpusError(f"{location.text} does not exist; --input takes files, directories and URIs")


def _directory_files(
    location: Location, kind: Kind | None, problems: Counter[str]
) -> Iterator[tuple[Location, fs.FileInfo, Kind]]:
    selector = fs.FileSelector(location.path, recursive=True)
    try:
        infos = sorted(location.filesystem.get_file_info(selector), key=lambda info: info.path)
    except UnicodeDecodeError as error:
        raise CorpusError(f"{location.text} holds a name that is not UTF-8; rename it ({error})") from error
    except OSError as error:
        raise CorpusError(f"cannot list {location.text}: {error}") from error
    for info in infos:
        name = info.path[len(location.path) :].lstrip("/")
        if not info.is_file or any(part[0] in "._" for part in PurePosixPath(name).parts):
            continue
        found = kind or _kind_of(info.base_name)
        if found is None:
            problems[Problem.SKIPPED] += 1
        else:
            yield location.child(name), info, found


def _kind_of(name: str) -> Kind | None:
    path = PurePosixPath(name.lower())
    suffix = PurePosixPath(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix
    return _KINDS.get(suffix)


def _data_set_files(directory: Location) -> Iterator[Location]:
    """The Arrow files of a data set that `datasets` saved in a directory; nothing for other directories."""
    splits, state = directory.child("dataset_dict.json"), directory.child("state.json")
    if splits.info().type == fs.FileType.File:
        for split in _listed(splits, "splits"):
            yield from _data_set_files(directory.child(str(split)))
    elif state.info().type == fs.FileType.File:
        for file in _listed(state, "_data_files"):
            if isinstance(file, dict) and "filename" in file:
                yield directory.child(str(file["filename"]))


def _listed(file: Location, key: str) -> list[Any]:
    """The list under a key of a JSON object; empty for a file that has none, which is no data set's."""
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return []
    items = found.get(key) if isinstance(found, dict) else None
    return items if isinstance(items, list) else []


def _cut(
    file: Location, size: int, kind: Kind, fields: Sequence[str] | None, problems: Counter[str]
) -> Iterator[Partition]:
    if kind == "parquet":
        yield from _cut_parquet(file, fields)
    elif kind == "arrow":
        yield from _cut_arrow(file, size, fields)
    elif kind == "jsonl" and _is_json_array(file):
        if size > _JSON_ARRAY_BYTES:
            raise CorpusError(f"{file.text} is one JSON array of {size >> 20} MB; convert it to JSON lines first")
        yield Partition(file=file.text, kind="json")
    elif PurePosixPath(file.path.lower()).suffix in _COMPRESSED:
        yield Partition(file=file.text, kind=kind)
    else:
        step = TEXT_BYTES if kind == "text" else PARTITION_BYTES
        if kind == "text" and size > step:
            problems[Problem.CUT] += 1
        for start in range(0, max(size, 1), step):
            stop = start + step if start + step < size else None
            yield Partition(file=file.text, kind=kind, start=start, stop=stop)


def _is_json_array(file: Location) -> bool:
    with file.filesystem.open_input_stream(file.path, compression="detect") as stream:
        return bool(stream.read(4096).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["))


def _cut_parquet(file: Location, fields: Sequence[str] | None) -> Iterator[Partition]:
    with file.filesystem.open_input_file(file.path) as handle:
        parquet = pq.ParquetFile(handle)
        columns = _columns(file, parquet.schema_arrow.names, fields)
        for group in range(parquet.num_row_groups):
            metadata = parquet.metadata.row_group(group)
            rows = metadata.num_rows
            step = _rows_a_partition(metadata.total_byte_size, rows)
            for start in range(0, rows, step):
                stop = min(start + step, rows)
                yield Partition(
                    file=file.text, kind="parquet", row_group=group, columns=columns, start=start, stop=stop
                )


def _cut_arrow(file: Location, size: int, fields: Sequence[str] | None) -> Iterator[Partition]:
    with open_batches(file) as reader:
        columns = _columns(file, reader.schema.names, fields)
        rows = sum(len(batch) for batch in batches_of(reader))
    step = _rows_a_partition(size, rows)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield Partition(file=file.text, kind="arrow", columns=columns, start=start, stop=stop)


def _rows_a_partition(size: int, rows: int) -> int:
    return max(1, rows // max(1, round(size / PARTITION_BYTES)))


def _columns(file: Location, names: Sequence[str], fields: Sequence[str] | None) -> tuple[str, ...]:
    """The columns of a table that hold its documents. Raises CorpusError where there are none."""
    if fields:
        columns = tuple(name for name in fields if name in names)
        if columns:
            return columns
        raise CorpusError(f"{file.text} has none of the fields {', '.join(fields)}; its columns are {', '.join(names)}")
    found = find_fields(dict.fromkeys(names))
    if found is None:
        raise CorpusError(
            f"{file.text} has no field known to hold text; its columns are {', '.join(names)}; "
            "name those to read with --text-fields"
        )
    return found


def open_batches(file: Location) -> pa.ipc.RecordBatchFileReader | pa.ipc.RecordBatchStreamReader:
    """An Arrow file or stream."""
    handle = pa.memory_map(file.path) if file.local else file.filesystem.open_input_file(file.path)
    try:
        return pa.ipc.open_file(handle)
    except pa.ArrowInvalid:
        handle.seek(0)
        return pa.ipc.open_stream(handle)


def batches_of(
    reader: pa.ipc.RecordBatchFileReader | pa.ipc.RecordBatchStreamReader,
) -> Iterator[pa.RecordBatch]:
    """Record batches of an Arrow file or stream, in order."""
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)
    else:
        yield from reader
