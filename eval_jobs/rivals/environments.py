"""Virtual environments of other systems, in the cache: made once, with pinned versions, and reused."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cluster.models.cache import cached_directory

TORCH_VARIABLE = "TORCH_INSTALL_ARGS"
_INSTALLED_WITHIN_S = 1800


class EnvironmentFailure(Exception):
    """A system that cannot be installed; one line says why."""


def environment_python(requirements: Sequence[Sequence[str]]) -> Path:
    """The interpreter of an environment that holds ``requirements``, which is made first where it lacks.

    Args:
        requirements: arguments of ``pip install``, one call after another.

    Raises:
        EnvironmentFailure: pip failed.
        ModelError: there is no space, or the cache cannot be written.
    """
    key = hashlib.sha256(repr((requirements, sys.version_info[:2])).encode()).hexdigest()
    return cached_directory(f"environment-{key[:32]}", partial(_fill, requirements)) / "bin" / "python"


def _fill(requirements: Sequence[Sequence[str]], directory: Path) -> None:
    venv.create(directory, with_pip=True)
    for arguments in requirements:
        _pip_install(directory / "bin" / "python", arguments)


def _pip_install(python: Path, arguments: Sequence[str]) -> None:
    # What is compiled looks for Python and its tools where an activated environment has them.
    activated = {"VIRTUAL_ENV": str(python.parents[1]), "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *arguments]
    command += os.environ.get(TORCH_VARIABLE, "").split()
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_INSTALLED_WITHIN_S,
            env=os.environ | activated,
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFailure(f"pip was not done after {_INSTALLED_WITHIN_S} s: {' '.join(arguments)}") from error
    if result.returncode != 0:
        errors = [line.strip() for line in result.stderr.splitlines() if line.startswith("ERROR")]
        raise EnvironmentFailure(f"pip: {errors[-1] if errors else result.stderr.strip()[-200:]}")
