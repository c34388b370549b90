"""Files of a build on any file system: each appears under its name only when it is complete."""

from __future__ import annotations

import hashlib
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from cluster.retrieval import CorpusError
from cluster.retrieval.manifest import FileEntry
from cluster.retrieval.storage import Location, sha256_of

_CHUNK = 1 << 22


def put(target: Location, write: Callable[[Path], object]) -> FileEntry:
    """Create or replace the file `target`, which `write` makes at a local path. Raises CorpusError."""
    try:
        if target.local is not None:
            return _put_local(target.local, write)
        return _upload(target, write)
    except OSError as error:
        raise CorpusError(f"cannot write {target.text}: {error.strerror or error}") from error


def _put_local(path: Path, write: Callable[[Path], object]) -> FileEntry:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        write(part)
        entry = _entry(path.name, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return entry


def _upload(target: Location, write: Callable[[Path], object]) -> FileEntry:
    """Object stores show an object when its upload is complete; other file systems get a rename."""
    folder, _, name = target.path.rpartition("/")
    with tempfile.TemporaryDirectory() as local:
        made = Path(local) / name
        write(made)
        entry = _entry(name, made)
        target.filesystem.create_dir(folder, recursive=True)
        direct = target.filesystem.type_name in ("s3", "gcs")
        path = target.path if direct else f"{folder}/.{name}.{uuid.uuid4().hex}.tmp"
        with made.open("rb") as source, target.filesystem.open_output_stream(path) as sink:
            while chunk := source.read(_CHUNK):
                sink.write(chunk)
    if not direct:
        target.filesystem.move(path, target.path)
    return entry


def _entry(name: str, path: Path) -> FileEntry:
    return FileEntry(name=name, bytes=path.stat().st_size, sha256=sha256_of(path))


def entry_of(target: Location) -> FileEntry:
    """Name, size and checksum of a file that is there. Raises CorpusError."""
    digest, size = hashlib.sha256(), 0
    try:
        with target.filesystem.open_input_stream(target.path) as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise CorpusError(f"cannot read {target.text}: {error}") from error
    return FileEntry(name=target.path.rpartition("/")[2], bytes=size, sha256=digest.hexdigest())


def exists(target: Location) -> bool:
    """Whether the file is there."""
    return target.info().type == fs.FileType.File


@contextmanager
def open_arrow(source: Location) -> Iterator[pa.ipc.RecordBatchFileReader]:
    """The Arrow file `source`, mapped where it is local. Raises CorpusError if it is no whole Arrow file."""
    try:
        if source.local is not None:
            handle = pa.memory_map(source.path)
        else:
            handle = source.filesystem.open_input_file(source.path)
        with handle, pa.ipc.open_file(handle) as reader:
            yield reader
    except (pa.ArrowException, OSError) as error:
        raise CorpusError(f"cannot read {source.text}: {error}") from error


def names_in(directory: Location) -> set[str]:
    """Names of the files directly in a directory; empty where there is none."""
    selector = fs.FileSelector(directory.path, allow_not_found=True)
    try:
        return {info.base_name for info in directory.filesystem.get_file_info(selector) if info.is_file}
    except OSError as error:
        raise CorpusError(f"cannot list {directory.text}: {error}") from error


def remove(target: Location) -> None:
    """Delete a file or a whole directory, if it is there."""
    kind = target.info().type
    if kind == fs.FileType.Directory:
        target.filesystem.delete_dir(target.path)
    elif kind == fs.FileType.File:
        target.filesystem.delete_file(target.path)
