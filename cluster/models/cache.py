"""The cache directory, and building a directory in it so that no reader ever sees half of it."""

import errno
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from cluster.models.errors import ModelError

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def cache_dir() -> Path:
    """The cache: $LOGITSPEC_CACHE, else ~/.cache/logitspec-cluster. Created if missing.

    Raises ModelError when it cannot be created.
    """
    path = Path(os.environ.get("LOGITSPEC_CACHE") or "~/.cache/logitspec-cluster").expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"cannot create the cache {path}: {error.strerror}; set LOGITSPEC_CACHE to a writable directory"
        ) from error
    return path


def cached_directory(name: str, build: Callable[[Path], None], needed_bytes: int = 0) -> Path:
    """The cache's directory `name`, made by `build(directory)` unless it is there already.

    The directory is built under another name and renamed when it is complete. Of processes that want it at
    the same time one builds and the others wait; should a file system's locks not hold, the first rename
    wins.
    `needed_bytes` is asked of the disk before building. Raises ModelError when there is no space.
    """
    final = cache_dir() / name
    if final.is_dir():
        return final
    try:
        with FileLock(final.with_name(f".{name}.lock")):
            if not final.is_dir():
                _clear_leftovers(final)
                require_space(final.parent, needed_bytes)
                _build_and_rename(final, build)
    except OSError as error:
        if is_no_space(error):
            raise no_space(final.parent) from error
        raise ModelError(
            f"cannot write to the cache {final.parent}: {error}; set LOGITSPEC_CACHE to a writable directory"
        ) from error
    return final


def require_space(directory: Path, needed_bytes: int) -> None:
    """Raise ModelError unless the disk of `directory` has `needed_bytes` free."""
    if shutil.disk_usage(directory).free < needed_bytes:
        raise no_space(directory, needed_bytes)


def no_space(directory: Path, needed_bytes: int = 0) -> ModelError:
    """The error for a full disk."""
    needed = f" ({needed_bytes / 1e6:.0f} MB needed)" if needed_bytes else ""
    return ModelError(
        f"no space left in the cache {directory}{needed}; free some, or set LOGITSPEC_CACHE to another disk"
    )


def is_no_space(error: BaseException) -> bool:
    """Whether an error says that the disk is full, in Python's way or in that of Rust libraries."""
    if isinstance(error, OSError) and error.errno in _NO_SPACE:
        return True
    return any(f"os error {code})" in str(error) for code in _NO_SPACE)


def _clear_leftovers(final: Path) -> None:
    """Remove what killed builds of the same directory left. The caller holds the lock, so none is running."""
    for leftover in final.parent.glob(f".{final.name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def _build_and_rename(final: Path, build: Callable[[Path], None]) -> None:
    work = final.with_name(f".{final.name}.{uuid.uuid4().hex}.tmp")
    work.mkdir()
    try:
        build(work)
        for file in work.iterdir():
            file.chmod(0o644)  # some writers make files private; the directory's own mode decides
        try:
            work.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
