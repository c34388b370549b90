"""Progress on stderr: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys

from tqdm import tqdm

_LINE_EVERY_S = 10.0
_BAR_EVERY_S = 0.5
_COLUMNS = 100


class _Lines:
    """A log for what tqdm would draw over itself."""

    def __init__(self) -> None:
        self._last = ""

    def write(self, text: str) -> None:
        """Print what has changed."""
        if (line := text.strip()) and line != self._last:
            print(line, file=sys.stderr, flush=True)
            self._last = line

    def flush(self) -> None:
        """Nothing waits: lines are written at once."""


class Progress:
    """Counts ``total`` units, of which some may have been done before; as a context it leaves its last state behind."""

    def __init__(self, total: int, what: str, unit: str, done: int = 0) -> None:
        terminal = sys.stderr.isatty()
        self._bar: tqdm[None] = tqdm(
            total=total,
            initial=done,
            desc=what,
            bar_format=f"{{desc}}: {{bar}} {{n_fmt}}/{{total_fmt}} {unit} [{{elapsed}}<{{remaining}}{{postfix}}]",
            ascii=None if terminal else " #",
            mininterval=_BAR_EVERY_S if terminal else _LINE_EVERY_S,
            file=sys.stderr if terminal else _Lines(),
            ncols=None if terminal else _COLUMNS,
        )
        self._failed = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, done: int = 1, failed: int = 0, note: str = "") -> None:
        """Count units, and those of them that failed; ``note`` says what has come of all so far."""
        self._failed += failed
        notes = [note] if note else []
        if self._failed:
            notes.append(f"{self._failed} failed")
        self._bar.set_postfix_str(", ".join(notes), refresh=False)
        self._bar.update(done)

    def tell(self, line: str) -> None:
        """A line of its own, above the bar."""
        self._bar.write(line, file=sys.stderr)
