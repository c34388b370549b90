"""Where a corpus lies: a local directory, or one on any file system pyarrow reaches, behind a local cache."""

from __future__ import annotations

import hashlib
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from cluster.retrieval.errors import CorpusError
from cluster.retrieval.manifest import MANIFEST_NAME, FileEntry, Manifest

_CHUNK = 1 << 22
_PYARROW_SCHEMES = {"file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs"}


@dataclass(frozen=True, slots=True)
class Location:
    """A directory on a pyarrow file system; `text` is how the user named it."""

    filesystem: fs.FileSystem
    path: str
    text: str

    @staticmethod
    def parse(text: str | Path) -> Location:
        """A local path, or a URI: s3://bucket/path, gs://…, hf://datasets/…. Raises CorpusError."""
        name = str(text)
        if not name:
            raise CorpusError("an empty path was given where a file or directory is needed")
        if "://" not in name:
            path = os.path.abspath(os.path.expanduser(name))
            return Location(fs.LocalFileSystem(), path, name)
        scheme, _, rest = name.partition("://")
        try:
            if scheme in _PYARROW_SCHEMES:
                filesystem, path = fs.FileSystem.from_uri(name)
            else:
                filesystem, path = _fsspec_file_system(scheme), rest
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError, ValueError, ImportError) as error:
            raise CorpusError(f"cannot use {name}: {error}") from error
        return Location(filesystem, path.rstrip("/") or "/", name)

    @property
    def local(self) -> Path | None:
        """The directory as a local path, or None when it is remote."""
        return Path(self.path) if isinstance(self.filesystem, fs.LocalFileSystem) else None

    def child(self, name: str) -> Location:
        """A file or directory in this one."""
        return Location(self.filesystem, f"{self.path.rstrip('/')}/{name}", f"{self.text.rstrip('/')}/{name}")

    def info(self) -> fs.FileInfo:
        """Kind and size. Raises CorpusError when the file system does not answer."""
        try:
            return self.filesystem.get_file_info(self.path)
        except (OSError, pa.ArrowInvalid, UnicodeEncodeError) as error:
            raise CorpusError(f"cannot reach {self.text}: {error}") from error

    def read_bytes(self) -> bytes:
        """The whole file. Raises CorpusError."""
        try:
            with self.filesystem.open_input_stream(self.path) as stream:
                return bytes(stream.read())
        except OSError as error:
            raise CorpusError(f"cannot read {self.text}: {error}") from error


def _fsspec_file_system(scheme: str) -> fs.FileSystem:
    """A file system that fsspec knows and pyarrow does not, such as hf:// (data sets of the Hugging Face hub)."""
    import fsspec

    return fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem(scheme)))


def read_manifest(directory: Location) -> Manifest:
    """The manifest of the corpus in a directory. Raises CorpusError where there is none."""
    file = directory.child(MANIFEST_NAME)
    if file.info().type == fs.FileType.File:
        return Manifest.parse(file.read_bytes(), file.text)
    if directory.info().type != fs.FileType.Directory:
        raise CorpusError(f"{directory.text} is not a directory; name the directory of a corpus")
    raise CorpusError(
        f"{directory.text} holds no {MANIFEST_NAME}, so it is no corpus, or its build has not finished; "
        "build it with python -m corpus_builder build"
    )


def local_file(directory: Location, entry: FileEntry, corpus_id: str, cache: Path | None = None) -> Path:
    """A corpus file as a local path of the right size, copied to the cache if remote. Raises CorpusError."""
    if directory.local is not None:
        path = directory.local / entry.name
        _check_size(path, entry)
        return path
    path = (cache or _default_cache()) / "corpora" / corpus_id / entry.name
    if not path.is_file() or path.stat().st_size != entry.bytes:
        _download(directory.child(entry.name), path, entry)
    return path


def check_sum(path: Path, entry: FileEntry) -> None:
    """Compare a file with the checksum in the manifest. Raises CorpusError naming the file."""
    if sha256_of(path) != entry.sha256:
        raise CorpusError(f"{path} is damaged: its SHA-256 is not the manifest's; rebuild the corpus or copy it again")


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_size(path: Path, entry: FileEntry) -> None:
    if not path.is_file():
        raise CorpusError(f"{path} is missing, though the manifest lists it; rebuild the corpus or copy it again")
    size = path.stat().st_size
    if size != entry.bytes:
        raise CorpusError(
            f"{path} has {size} bytes where the manifest says {entry.bytes}: it is cut short or not the file "
            "that was built; rebuild the corpus or copy it again"
        )


def _default_cache() -> Path:
    return Path(os.environ.get("LOGITSPEC_CACHE") or "~/.cache/logitspec-cluster").expanduser().absolute()


def _download(source: Location, path: Path, entry: FileEntry) -> None:
    """Copy a remote file next to its place, check it and rename it. Raises CorpusError."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with source.filesystem.open_input_stream(source.path) as stream, part.open("wb") as file:
            while chunk := stream.read(_CHUNK):
                file.write(chunk)
        _check_size(part, entry)
        check_sum(part, entry)
        part.replace(path)
    except OSError as error:
        raise CorpusError(
            f"cannot copy {source.text} to {path.parent}: {error}; LOGITSPEC_CACHE names the cache to use"
        ) from error
    finally:
        part.unlink(missing_ok=True)
