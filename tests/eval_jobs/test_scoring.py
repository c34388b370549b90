"""Answers are matched however they are written; programs are run within limits."""

from __future__ import annotations

import pytest

from eval_jobs.scoring import is_right_expression, is_right_number, program_with_tests, run_program


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("2 + 2 = 4. The answer is 4.", "4"),
        ("So we get 12\n#### 1,234", "1234"),
        ("therefore \\boxed{025}", "25"),
        ("It costs $18.00 in all", "18"),
        ("The answer is: $-3.50", "-3.5"),
        ("first 5, then 7 apples", "7"),
        ("The answer is 27", "27.0"),
        ("the answer is 1\nno, the answer is 2", "2"),
    ],
)
def test_right_numbers(text, answer):
    assert is_right_number(text, answer)


@pytest.mark.parametrize(
    ("text", "answer"), [("The answer is 5.", "4"), ("none", "4"), ("\\boxed{41}", "4"), ("", "0")]
)
def test_wrong_numbers(text, answer):
    assert not is_right_number(text, answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{\\dfrac{1}{2}}", "\\frac{1}{2}"),
        ("we get \\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "(3,\\frac{\\pi}{2})"),
        ("The answer is $0.5$.", "\\frac{1}{2}"),
        ("\\boxed{x^2 + {y}}", "x^2+{y}"),
        ("\\boxed{10\\%}", "10"),
    ],
)
def test_right_expressions(text, answer):
    assert is_right_expression(text, answer)


@pytest.mark.parametrize("text", ["\\boxed{3}", "no answer", "\\boxed{", "\\boxed{\\frac{1}{0}}"])
def test_wrong_expressions(text):
    assert not is_right_expression(text, "\\frac{1}{2}")


def test_huge_powers_of_ten_are_no_numbers():
    assert not is_right_number("The answer is 7", "1e400000000")
    assert not is_right_expression("\\boxed{1e-400000000}", "0")
    assert is_right_expression("\\boxed{1e3}", "1000")


PREFIX = "import math\n\n\ndef area(r):\n    '''Area of a circle.'''\n"
TESTS = "assert abs(area(1) - 3.14159) < 1e-3\n"


@pytest.mark.parametrize(
    "answer",
    [
        "```python\ndef area(r):\n    return math.pi * r * r\n```\nThat is it.",
        "    return math.pi * r ** 2\n",
        "```\n    return math.pi * r ** 2\n```",
        "```python\nimport math\ndef area(r):\n    return math.pi * r * r",
    ],
)
def test_programs_of_right_answers_pass(answer):
    assert run_program(program_with_tests(answer, PREFIX, TESTS))


@pytest.mark.parametrize("answer", ["    return r\n", "I cannot.", "```python\ndef area(r): return 0\n```"])
def test_programs_of_wrong_answers_fail(answer):
    assert not run_program(program_with_tests(answer, PREFIX, TESTS))


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "x = bytearray(2 << 30)",
        "open('f', 'wb').write(b'x' * (4 << 20))",
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])",
        "raise SystemExit(1)",
        "raise SystemExit(0)",  # the tests behind it do not run
        "import os; os._exit(0)",
    ],
)
def test_programs_beyond_their_limits_fail(program):
    assert not run_program(program, timeout_s=1.5)


def test_programs_see_nothing_of_ours(monkeypatch, tmp_path):
    monkeypatch.setenv("OUR_SECRET", "x")
    monkeypatch.chdir(tmp_path)
    assert run_program("import os; assert 'OUR_SECRET' not in os.environ and os.listdir('.') == []")
