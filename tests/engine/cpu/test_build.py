"""Compiling the kernels: once, safely from several processes, and with a way out where it is impossible."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cluster.engine.cpu import build, kernels, optimize
from cluster.engine.cpu.linear import OneDnnLinear, pack_linear
from tests.engine.cpu.conftest import tiny_llama

_LOAD_AND_MULTIPLY = """
import torch
from cluster.engine.cpu.kernels import load_kernels
from cluster.engine.cpu.linear import pack
layer = pack(load_kernels(), torch.eye(40))
print(torch.equal(layer(torch.arange(80.0).view(2, 40)), torch.arange(80.0).view(2, 40)))
"""


@pytest.fixture
def fresh_process_state():
    """As if nothing had been loaded yet."""
    kernels._load_once.cache_clear()
    yield
    kernels._load_once.cache_clear()


@pytest.fixture
def quick_compiler(kernels, tmp_path, monkeypatch) -> Path:
    """A compiler that takes a moment and delivers the kernels compiled before."""
    ready = build.cache_directory() / f"kernels-{build._key(build.find_compiler())}.so"
    compiler = tmp_path / "compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        '[ "$1" = --version ] && exit 0\n'
        'while [ "$1" != -o ]; do shift; done\n'
        f'sleep 0.3; cp "{ready}" "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return compiler


def test_two_processes_may_compile_at_once(quick_compiler, tmp_path):
    environment = os.environ | {build.CACHE_VARIABLE: str(tmp_path / "cache")}
    command = [sys.executable, "-c", _LOAD_AND_MULTIPLY]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in both] == ["True", "True"]
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".so"]


def test_a_damaged_library_is_built_anew(quick_compiler, tmp_path, monkeypatch):
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path))
    path = tmp_path / f"kernels-{build._key(build.find_compiler())}.so"
    path.write_bytes(b"not a library")
    assert build.load_library().ls_panel() in (16, 32)
    assert path.read_bytes()[:4] == b"\x7fELF"


def test_without_a_compiler_the_model_still_runs(tmp_path, monkeypatch, caplog, fresh_process_state):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    model = tiny_llama()
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        expected = model(ids).logits
    with caplog.at_level(logging.WARNING):
        assert not kernels.available()
        done = optimize(model)
    assert sum("no C++ compiler" in record.message for record in caplog.records) == 1
    assert isinstance(pack_linear(torch.randn(8, 8)), OneDnnLinear)
    assert pack_linear(torch.randn(8, 8, dtype=torch.float16)) is None
    assert not done.batch_invariant
    with torch.inference_mode():
        assert torch.allclose(model(ids).logits, expected, atol=1e-4)


def test_a_compiler_that_fails_is_reported(tmp_path, monkeypatch, caplog, fresh_process_state):
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'out of registers' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING):
        assert not kernels.available()
    assert "out of registers" in caplog.text


def test_a_cache_that_cannot_be_written_is_reported(tmp_path, monkeypatch, caplog, fresh_process_state):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv(build.CACHE_VARIABLE, str(blocked / "cache"))
    with caplog.at_level(logging.WARNING):
        loaded = kernels.available()
    assert loaded is False
    assert "cannot build or load" in caplog.text
