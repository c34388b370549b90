"""Progress on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys

from tqdm import tqdm

_LINE_EVERY_S = 10.0
_BAR_EVERY_S = 0.5


def progress_bar(total: int, what: str, unit: str, done: int = 0) -> tqdm[None]:
    """A bar for ``total`` units, of which some may have been done before."""
    interval = _BAR_EVERY_S if sys.stderr.isatty() else _LINE_EVERY_S
    return tqdm(total=total, initial=done, desc=what, unit=unit, mininterval=interval)
