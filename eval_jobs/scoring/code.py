"""Run the code that a model wrote, against its tests, in a process of its own with limits on time and memory.

The limits keep an accident small: an endless loop, a huge list, a large file. They are no sandbox against malice; run
answers of models you do not trust on a machine you can lose.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

_BLOCK = re.compile(r"```(?:python|py)?[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


def program_with_tests(text: str, prefix: str, tests: str) -> str:
    """The program to run: the answer's code (its first code block, else all of it) with its tests behind it.

    An answer that defines the function brings it whole and needs of the prefix only what stands before the function,
    its imports and helpers; any other answer continues the prefix.
    """
    block = _BLOCK.search(text)
    code = block.group(1) if block else text
    name = re.findall(r"^def (\w+)", prefix, re.MULTILINE)
    if name and re.search(rf"^\s*def {name[-1]}\b", code, re.MULTILINE):
        head = prefix[: prefix.rindex(f"def {name[-1]}")]
        return f"{head}\n{code}\n\n{tests}"
    return f"{prefix}{code}\n\n{tests}"


@cache  # methods that give the same answer have it run once
def run_program(program: str, timeout_s: float = 10.0, memory_mib: int = 1024) -> bool:
    """True if the program runs to its last line, without an error, within its limits."""
    with tempfile.TemporaryDirectory() as directory:
        reached = Path(directory, secrets.token_hex(8))  # as an answer that exits would end well, too
        program += f"\nopen({reached.name!r}, 'x').close()\n"
        process = subprocess.Popen(
            [sys.executable, "-I", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            env={"PATH": os.defpath, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=lambda: _limit(timeout_s, memory_mib),
        )
        try:
            process.communicate(program.encode("utf-8", "replace"), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(process)
        return process.returncode == 0 and reached.exists()


def _limit(timeout_s: float, memory_mib: int) -> None:
    seconds = int(timeout_s) + 1
    resource.setrlimit(resource.RLIMIT_AS, (memory_mib << 20, memory_mib << 20))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the program and whatever it started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
