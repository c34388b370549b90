"""Which answers are compared with which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from eval_jobs.rows import Row
from eval_jobs.systems import HF_SYSTEMS


def reference_rows(rows: Iterable[Row]) -> dict[tuple[tuple[str, str, int], int], Row]:
    """The answer that others are compared with, by (prompt, repeat): vanilla's, or without it Hugging Face's."""
    found: dict[tuple[tuple[str, str, int], int], Row] = {}
    for row in rows:
        if row.error is None and row.method in ("hf", "vanilla"):
            place = row.key.prompt, row.repeat
            if row.method == "vanilla" or place not in found:
                found[place] = row
    return found


def compared(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Answers with vanilla's to the same prompt ids; Hugging Face's only where nothing is drawn."""
    base = {place: row for place, row in reference_rows(rows).items() if row.method == "vanilla"}
    for row in rows:
        reference = base.get((row.key.prompt, row.repeat))
        if reference is None or row.error is not None or row.method == "vanilla":
            continue
        if row.prompt_ids == reference.prompt_ids:
            yield row, reference


def is_comparable(method: str, temperature: float) -> bool:
    """False for Hugging Face's draws, whose noise is another."""
    return not (temperature and method in HF_SYSTEMS)
