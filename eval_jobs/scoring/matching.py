"""Find the final answer in a text and compare it with the right one."""

from __future__ import annotations

import re
from fractions import Fraction

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_MARKS = re.compile(r"(?:####|answer\s+is\s*:?|answer\s*:)", re.IGNORECASE)
_FRACTION = re.compile(r"(-?)\\frac\{(-?[\d.]+)\}\{(-?[\d.]+)\}")
_HUGE = re.compile(r"e[+-]?\d{4,}", re.IGNORECASE)  # a power of ten that takes minutes to write out
_DROPPED = ("\\left", "\\right", "\\!", "\\,", "\\;", "\\ ", "$", "^\\circ", "^{\\circ}", "\\%", "%")


def is_right_number(text: str, answer: str) -> bool:
    """True if the number that ``text`` ends in, or marks as its answer, equals ``answer``."""
    found = _NUMBER.findall(final_answer(text)) or _NUMBER.findall(text)[-1:]
    wanted = _number(answer)
    return bool(found) and wanted is not None and _number(found[0]) == wanted


def is_right_expression(text: str, answer: str) -> bool:
    """True if the expression that ``text`` boxes, or marks as its answer, is ``answer`` up to its spelling."""
    found, wanted = _normal(final_answer(text)), _normal(answer)
    if not found:
        return False
    one, other = _number(found), _number(wanted)
    return found == wanted or (one is not None and one == other)


def final_answer(text: str) -> str:
    """What stands in the last ``\\boxed{}``, else behind the last "answer is" or "####" up to the line's end."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    marks = list(_MARKS.finditer(text))
    if not marks:
        return ""
    return text[marks[-1].end() :].strip().split("\n")[0].strip().rstrip(".")


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = at = start + len("\\boxed{")
    depth = 1
    while at < len(text):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[begin:at]
        at += 1
    return None


def _normal(expression: str) -> str:
    """The same expression without what does not change its value: spaces, sizes of brackets, units' dressing."""
    for piece in _DROPPED:
        expression = expression.replace(piece, "")
    expression = re.sub(r"\\text\{[^}]*\}", "", expression)
    expression = expression.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return re.sub(r"\s+", "", expression).rstrip(".")


def _number(text: str) -> Fraction | None:
    """The value of an integer, a decimal or a fraction; None if it is none of them."""
    text = _FRACTION.sub(r"\1\2/\3", text.strip().replace(",", "").replace(" ", ""))
    if _HUGE.search(text):
        return None
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        pass
    parts = text.split("/")
    try:
        return Fraction(parts[0]) / Fraction(parts[1]) if len(parts) == 2 else None
    except (ValueError, ZeroDivisionError):
        return None
