"""The demonstration in a tiny form, beside other users of the usual port; and that nothing of it stays."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil

from eval_jobs.demo import running
from tests.tiny import tiny_model


@contextlib.contextmanager
def port_8000_taken() -> Iterator[None]:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # somebody else has it: just as well
            taken.bind(("127.0.0.1", 8000))
            taken.listen()
        yield


def test_the_whole_path(tmp_path):
    loaded = tiny_model(seed=1)
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    command = [sys.executable, "-m", "eval_jobs", "demo", "--model", str(tmp_path), "--max-new-tokens", "8"]
    environment = os.environ | {"RAY_ADDRESS": "127.0.0.1:1", "OMP_NUM_THREADS": "1"}  # a cluster to keep away from
    with port_8000_taken():
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    for part in ("n-grams", "http://127.0.0.1:", "> Write a Python class", "a step; drafts accepted", "logitspec"):
        assert part in done.stdout
    assert done.stdout.count("[8 tokens") == 5


def test_a_process_and_its_children_end_with_the_block():
    child = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(100)"
    leader = f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {child!r}]); "
    leader += "print(p.pid, flush=True); time.sleep(100)"

    def left_early() -> tuple[subprocess.Popen[bytes], psutil.Process]:
        with running([sys.executable, "-c", leader], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            return process, psutil.Process(int(process.stdout.readline()))

    process, grandchild = left_early()
    assert process.returncode is not None
    grandchild.wait(10)
