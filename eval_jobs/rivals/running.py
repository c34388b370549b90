"""Running a system: a request in one JSON file, a process of its own interpreter, the answer in another file.

Request: ``model`` (directory), ``dtype``, ``prompts`` (token ids), ``at_once``, ``max_new_tokens``, ``stop_ids``,
``options``, ``warm_up`` (a prompt that is answered, and not timed, before) and ``warm_up_tokens``.
Answer: ``token_ids`` by prompt, ``seconds`` for all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval_jobs.rivals.catalogue import Rival
from eval_jobs.rivals.environments import environment_python

_HERE = Path(__file__).parent


class RivalFailure(Exception):
    """A system that did not answer; one line says why."""


@dataclass(frozen=True)
class Answers:
    """What a system made of all prompts: tokens by prompt, and the wall time of all together."""

    token_ids: list[list[int]]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """All tokens by all time, prefill included."""
        return sum(map(len, self.token_ids)) / self.seconds


def interpreter(rival: Rival) -> Path:
    """The Python that runs a system. Raises EnvironmentFailure, ModelError."""
    if rival.requirements is None:
        return Path(sys.executable)
    return environment_python([[a.format(here=_HERE) for a in line] for line in rival.requirements])


def answer(rival: Rival, python: Path, request: dict[str, Any], timeout_s: float) -> Answers:
    """Run a system on a request.

    Raises:
        RivalFailure: it failed or took longer than ``timeout_s``.
    """
    with tempfile.TemporaryDirectory() as scratch:
        request_file, answer_file, log = (Path(scratch) / name for name in ("request.json", "answer.json", "log"))
        request_file.write_text(json.dumps(request | {"options": rival.options}))
        command = [str(python), str(_HERE / "runners" / rival.runner), str(request_file), str(answer_file)]
        with log.open("w") as output:
            try:
                result = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    timeout=timeout_s,
                    env=_environment(rival, python),
                    cwd=_HERE.parents[1] if rival.requirements is None else scratch,
                )
            except subprocess.TimeoutExpired as error:
                raise RivalFailure(f"no answer after {timeout_s:.0f} s") from error
        if result.returncode != 0 or not answer_file.exists():
            raise RivalFailure(_reason(log.read_text(errors="replace"), result.returncode))
        return Answers(**json.loads(answer_file.read_text()))


def _environment(rival: Rival, python: Path) -> dict[str, str]:
    cpus = sorted(os.sched_getaffinity(0))
    known = {"environment": python.parents[1], "cpus": ",".join(map(str, cpus)), "threads": len(cpus)}
    own = {name: value.format(**known) for name, value in rival.environment.items()}
    project = {"PYTHONPATH": str(_HERE.parents[1])} if rival.requirements is None else {}
    return os.environ | {"HF_HUB_OFFLINE": "1"} | project | own


def _reason(log: str, code: int) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception", "Failure"))]
    return (errors or lines or [f"exit code {code}"])[-1][:200]
