"""A progress bar with the time that is left; in a log, a line now and then."""

from __future__ import annotations

import sys
import time

_WIDTH = 30
_LOG_EVERY_S = 10.0


class Progress:
    """Counts done pieces of ``total`` and shows them on stderr."""

    def __init__(self, total: int, what: str) -> None:
        self._total = total
        self._what = what
        self._done = self._failed = 0
        self._first: tuple[float, int] | None = None  # when the first was done, and how many with it
        self._shown = 0.0

    def add(self, done: int, failed: int = 0) -> None:
        """Count pieces and show the bar."""
        self._done += done
        self._failed += failed
        now = time.monotonic()
        self._first = self._first or (now, self._done)
        if sys.stderr.isatty():
            print(f"\r{self._line(now)}", end="", file=sys.stderr, flush=True)
        elif now - self._shown > _LOG_EVERY_S or self._done == self._total:
            self._shown = now
            print(self._line(now), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the bar as it is."""
        if sys.stderr.isatty() and self._done:
            print(file=sys.stderr)

    def _line(self, now: float) -> str:
        share = self._done / self._total
        filled = int(share * _WIDTH)
        failed = f", {self._failed} failed" if self._failed else ""
        bar = "█" * filled + "·" * (_WIDTH - filled)
        return f"{bar} {self._done}/{self._total} {self._what}{failed}{self._left(now)}"

    def _left(self, now: float) -> str:
        """The time left at the pace since the first was done: before it came what happens once, such as loading."""
        since, done = self._first or (now, self._done)
        if self._done == done or self._done == self._total:
            return ""
        return f", {_clock((now - since) / (self._done - done) * (self._total - self._done))} left"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
