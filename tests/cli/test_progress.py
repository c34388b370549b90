"""Progress in a log, which is what stderr is in a test."""

import contextlib

import pytest

from cluster.cli.progress import Progress


def test_a_log_gets_lines_and_the_last_one_says_what_came_of_it(capsys: pytest.CaptureFixture[str]):
    with Progress(5, "answer", "tasks", done=1) as progress:
        progress.advance(2, failed=1)
        progress.tell("one died")
        progress.advance(2, failed=1, note="40 tokens")
    lines = capsys.readouterr().err.splitlines()
    assert "\r" not in "".join(lines)
    assert "one died" in lines
    assert lines[0].startswith("answer: ") and "1/5 tasks" in lines[0]
    assert "5/5 tasks" in lines[-1] and "40 tokens, 2 failed" in lines[-1]
    assert len(set(lines)) == len(lines)


def test_what_is_cut_off_says_how_far_it_came(capsys: pytest.CaptureFixture[str]):
    with contextlib.suppress(KeyboardInterrupt), Progress(4, "check", "checks") as progress:
        progress.advance()
        raise KeyboardInterrupt
    assert "1/4 checks" in capsys.readouterr().err.splitlines()[-1]
