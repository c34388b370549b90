"""Directories in the cache appear whole or not at all."""

import errno
import subprocess
import sys

import pytest

from cluster.models.cache import cache_dir, cached_directory, require_space
from cluster.models.errors import ModelError
from cluster.models.failures import explained


def test_build_runs_once(own_cache):
    calls = []

    def build(directory):
        calls.append(directory)
        (directory / "file").write_text("content")

    first, second = cached_directory("thing", build), cached_directory("thing", build)
    assert first == second == own_cache / "thing"
    assert (first / "file").read_text() == "content"
    assert len(calls) == 1


def test_failed_build_leaves_nothing_and_can_be_repeated(own_cache):
    def fail(directory):
        (directory / "half").touch()
        raise ModelError("broken")

    with pytest.raises(ModelError, match="broken"):
        cached_directory("thing", fail)
    assert [path.name for path in own_cache.iterdir()] == [".thing.lock"]
    assert cached_directory("thing", lambda directory: None).is_dir()


def test_what_a_killed_build_left_is_removed(own_cache):
    leftover = own_cache / ".thing.0123.tmp"
    leftover.mkdir(parents=True)
    (leftover / "big").touch()
    cached_directory("thing", lambda directory: None)
    assert not leftover.exists()


def test_first_of_two_builds_wins_where_locks_do_not_hold(own_cache):
    def build(directory):
        other = own_cache / "thing"
        other.mkdir()
        (other / "by").write_text("other")
        (directory / "by").write_text("us")

    assert (cached_directory("thing", build) / "by").read_text() == "other"
    assert not list(own_cache.glob(".thing.*.tmp"))


def test_processes_racing_for_one_conversion_all_succeed(own_cache, tiny_gguf):
    code = f"""if True:
        from pathlib import Path
        from cluster.models.gguf_convert import converted_model
        print(converted_model(Path({str(tiny_gguf)!r})))
    """
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0].split()[-1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1]
    assert len(list(own_cache.glob("gguf-*-model-*"))) == 1
    assert not list(own_cache.glob(".*.tmp"))


def test_too_little_space_is_said_before_building(own_cache):
    with pytest.raises(ModelError, match=r"no space left.*MB needed.*LOGITSPEC_CACHE"):
        cached_directory("thing", lambda directory: pytest.fail("built"), needed_bytes=10**18)
    with pytest.raises(ModelError, match="no space left"):
        require_space(cache_dir(), 10**18)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_disk_filling_up_while_building(own_cache, error):
    def build(directory):
        with explained("a model"):
            raise error

    with pytest.raises(ModelError, match=r"no space left in the cache .*LOGITSPEC_CACHE"):
        cached_directory("thing", build)
    assert not (own_cache / "thing").exists()


def test_cache_that_cannot_be_created(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOGITSPEC_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match="LOGITSPEC_CACHE"):
        cache_dir()
