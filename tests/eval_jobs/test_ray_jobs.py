"""A sweep as a real Ray job, with token authentication and without; killed in the middle and submitted again."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

import eval_jobs.__main__ as command
from eval_jobs.run_directory import RunDirectory
from eval_jobs.systems import HF_SYSTEMS, SYSTEMS
from tests.eval_jobs.conftest import CATEGORIES, write_bench, write_text_corpus

RAY = str(Path(sys.executable).with_name("ray"))


@dataclass(frozen=True, slots=True)
class Head:
    """A running head node: the address for jobs and the environment of its commands."""

    address: str
    environment: dict[str, str]

    def ray(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a ``ray job`` command."""
        address = ["--address", self.address]
        return subprocess.run(
            [RAY, "job", arguments[0], *address, *arguments[1:]],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=200,
        )


@pytest.fixture(params=["token", "disabled"])
def head(request) -> Iterator[Head]:
    """``ray start --head`` on loopback, with ports and a directory of its own; ended with all its processes."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment |= {"RAY_AUTH_MODE": request.param, "RAY_worker_niceness": "0"}
    if request.param == "token":
        environment["RAY_AUTH_TOKEN"] = secrets.token_hex(16)
    directory = tempfile.mkdtemp(prefix="rj", dir="/tmp")  # short: sockets lie in it
    ports = iter(free_ports(7))
    dashboard = next(ports)
    options = {
        "node-ip-address": "127.0.0.1",
        "port": next(ports),
        "dashboard-host": "127.0.0.1",
        "dashboard-port": dashboard,
        "dashboard-agent-listen-port": next(ports),
        "dashboard-agent-grpc-port": next(ports),
        "runtime-env-agent-port": next(ports),
        "metrics-export-port": next(ports),
        "ray-client-server-port": next(ports),
        "temp-dir": directory,
        "num-cpus": 2,
        "object-store-memory": 100 << 20,
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    process = subprocess.Popen(
        [RAY, "start", "--head", "--block", "--disable-usage-stats", *arguments],
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        head = Head(f"http://127.0.0.1:{dashboard}", environment)
        wait_for(lambda: head.ray("list").returncode == 0, process)
        yield head
    finally:
        for ours in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                ours.kill()
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def test_a_sweep_survives_being_killed(head: Head, model_dir, tmp_path, capsys):
    is_locked = head.environment["RAY_AUTH_MODE"] == "token"
    per_category = 5 if is_locked else 1
    bench = write_bench(tmp_path / "bench.jsonl", per_category)
    corpus = write_text_corpus(tmp_path / "corpus", model_dir, "Say qa and rag and coding " * 4)
    run = RunDirectory(tmp_path / "run")
    entrypoint = [sys.executable, "-m", "eval_jobs", "sweep", "--bench", bench, "--out", str(run.path)]
    entrypoint += ["--model", model_dir, "--dtype", "float32", "--methods", ",".join(SYSTEMS), "--capacity", "8"]
    entrypoint += ["--corpus", corpus, "--max-new-tokens", "16", "--cpus-per-actor", "1", "--record-traces"]
    total = (len(CATEGORIES) + 2) * per_category * len(SYSTEMS)

    if is_locked:
        stranger = Head(head.address, {**head.environment, "RAY_AUTH_TOKEN": secrets.token_hex(16)})
        assert stranger.ray("submit", "--", "true").returncode != 0
    assert head.ray("submit", "--no-wait", "--submission-id", "first", "--", *entrypoint).returncode == 0
    wait_for(lambda: len(list((run.path / "rows").glob("*.parquet"))) > 3)
    driver = driver_of(run)
    driver.suspend()  # so that the end comes in the middle, however slowly it is told
    if is_locked:
        head.ray("stop", "first")
    else:
        driver.kill()
    finished = {r.key: r.started for r in run.rows.read()}
    assert 0 < len(finished) < total

    submitted = head.ray("submit", "--", *entrypoint)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    rows = run.rows.read()
    assert len(rows) == total and all(r.error is None for r in rows)
    assert {r.key: r.started for r in rows if r.key in finished} == finished  # kept as they were
    assert sum(pq.read_metadata(f).num_rows for f in (run.path / "rows").iterdir()) == total  # nothing twice

    assert command.main(["report", str(run.path)]) == 0
    summary = json.loads((run.path / "report" / "summary.json").read_text())[0]
    assert set(summary["methods"]) == set(SYSTEMS)
    for method in set(SYSTEMS) - {*HF_SYSTEMS, "vanilla"}:
        figures = summary["methods"][method]["overall"]
        exactness = figures["exactness"]
        assert exactness["identical"] == total / len(SYSTEMS) and not exactness["wrong"]
        lacking = {name for name, value in figures.items() if value in (None, [], {})}
        assert lacking == ({"ranks"} if method in ("pld", "rest") else set())  # these guess from no logits


def driver_of(run: RunDirectory) -> psutil.Process:
    """The process of the sweep that writes to this run."""
    return next(p for p in psutil.process_iter(["cmdline"]) if {"sweep", str(run.path)} <= {*(p.info["cmdline"] or [])})


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes] | None = None) -> None:
    """Until it holds, or the process has ended, or two minutes have passed."""
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end and (process is None or process.poll() is None)
        time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
