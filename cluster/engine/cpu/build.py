"""Compiles the CPU kernels on first use and keeps the library in a cache directory.

The library depends on the sources, the compiler and the processor (it is built for the machine it runs
on); all of them are in its file name, so a cache directory may be shared between machines and survives
upgrades.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

CACHE_VARIABLE = "LOGITSPEC_CACHE"
"""Environment variable that names the cache directory."""

_SOURCES = Path(__file__).parent / "native"
_COMPILERS = ("g++", "c++", "clang++")
# No fast-math: NaN and infinity keep their meaning. No contraction: every fused multiply-add is written as
# one, so two places that compute the same thing get the same bits.
_FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fPIC")
_COMPILE_TIMEOUT_S = 300


class BuildError(RuntimeError):
    """The kernels cannot be compiled or loaded here; the message says why."""


def cache_directory() -> Path:
    """Where compiled kernels are kept: ``$LOGITSPEC_CACHE``, else a folder under the user's cache."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen) if chosen else Path.home() / ".cache" / "logitspec-cluster" / "kernels"


def find_compiler() -> str:
    """Path of the C++ compiler: ``$CXX`` if set, else the first usual one on ``PATH``."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else _COMPILERS
    for name in names:
        path = shutil.which(name)
        if path:
            return path
    raise BuildError(f"no C++ compiler found (looked for {', '.join(names)}); install g++ or clang++")


def load_library() -> ctypes.CDLL:
    """The kernels, compiled if need be.

    Raises:
        BuildError: no compiler, no OpenMP runtime, or the compilation or loading failed.
    """
    _publish_openmp()
    compiler = find_compiler()
    path = cache_directory() / f"kernels-{_key(compiler)}.so"
    try:
        if path.exists():
            try:
                return ctypes.CDLL(str(path))
            except OSError:
                pass  # damaged on disk: build it anew
        _compile(compiler, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"cannot build or load {path}: {error}") from error


def _publish_openmp() -> None:
    """Makes the OpenMP runtime that torch uses visible to the kernels: there is to be one pool of threads."""
    import torch

    library_folder = Path(torch.__file__).parent
    candidates = [path for path in _loaded_libraries() if path.name.startswith(("libgomp", "libiomp5"))]
    candidates.sort(key=lambda path: library_folder not in path.parents)  # torch's own first
    candidates += sorted((library_folder / "lib").glob("libgomp*.so*"))
    if not candidates:
        raise BuildError("found no GNU-compatible OpenMP runtime in this process")
    try:
        library = ctypes.CDLL(str(candidates[0]), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise BuildError(f"cannot load the OpenMP runtime {candidates[0]}: {error}") from error
    if not hasattr(library, "GOMP_parallel"):
        raise BuildError(f"the OpenMP runtime {candidates[0]} lacks the GNU entry points")


def _loaded_libraries() -> list[Path]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[5] for line in lines if line.endswith(".so") or ".so." in line)
    return [Path(path) for path in dict.fromkeys(paths)]


def _key(compiler: str) -> str:
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update(_run([compiler, "--version"]).encode())
    digest.update("\0".join((*_flags(), platform.machine(), _cpu_features())).encode())
    return digest.hexdigest()[:20]


def _flags() -> tuple[str, ...]:
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return (*_FLAGS, "-march=native" if x86 else "-mcpu=native")


def _cpu_features() -> str:
    """The line of /proc/cpuinfo that decides what code may run here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = ("flags", "Features", "model name")
    found = {line.split(":", 1)[0].strip(): line for line in lines if line.startswith(names)}
    return "\n".join(found[name] for name in names if name in found)


def _compile(compiler: str, path: Path) -> None:
    """Builds ``path``; a second process that does the same at once is harmless, the last rename wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        built = Path(folder) / "kernels.so"
        # The symbols of the OpenMP runtime stay undefined: they are those of the library torch has loaded.
        _run([compiler, *_flags(), "-shared", "-o", str(built), str(_SOURCES / "kernels.cpp")])
        os.replace(built, path)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} failed: {error}") from error
    if done.returncode:
        raise BuildError(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout
