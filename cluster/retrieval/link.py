"""A client's link to one actor: questions and answers by number, rest for an actor in trouble, finding it again."""

from __future__ import annotations

import threading
from collections.abc import Callable

from cluster.retrieval.server import Connection, Message

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_MOST_UNANSWERED = 2  # questions that missed their deadline, before no more are asked
_HUNG_S = 5.0  # after which an unanswered question means that the connection is no good


class Link:
    """One actor as a client sees it.

    Args:
        shard: what it holds.
        connect: finds the actor and connects to it; None where it is not to be found. Runs in a background
            thread, so it may wait.
    """

    def __init__(self, shard: int, connect: Callable[[], Connection | None]) -> None:
        self.shard = shard
        self._connect = connect
        self._connection: Connection | None = None
        self._closed = threading.Event()
        self._awaited: set[int] = set()
        self._unanswered: dict[int, float] = {}  # late questions by number, and when they were asked
        self._answers: dict[int, Message] = {}
        self._pause_s = 0.0
        self._next_try = 0.0

    def attach(self, connection: Connection | None) -> None:
        """Use this connection; None seeks one."""
        self._connection = connection
        if connection is None:
            self._seek()

    @property
    def connected(self) -> bool:
        """Whether there is a connection, be the actor well or not."""
        return self._connection is not None

    @property
    def unanswered(self) -> int:
        """Questions that missed their deadline and may still be answered."""
        return len(self._unanswered)

    def free(self, now: float) -> bool:
        """Whether the actor may be asked now."""
        if self._connection is None or now < self._next_try:
            return False
        if self._unanswered:
            self.receive()
            if any(now - since > _HUNG_S for since in self._unanswered.values()):
                self._lose()
        return self._connection is not None and len(self._unanswered) < _MOST_UNANSWERED

    def ask(self, number: int, content: bytes) -> bool:
        """Send a question, whose number must be new; False when the actor is gone."""
        if self._connection is None:
            return False
        try:
            self._connection.send(number, content)
        except OSError:
            self._lose()
            return False
        self._awaited.add(number)
        return True

    def fileno(self) -> int:
        """For select; only while `connected`."""
        assert self._connection is not None
        return self._connection.fileno()

    def receive(self) -> None:
        """Take what has come; answers to questions that nobody waits for any more are dropped."""
        if self._connection is None:
            return
        try:
            messages = self._connection.receive()
        except OSError:
            self._lose()
            return
        for message in messages:
            self._unanswered.pop(message[0], None)
            if message[0] in self._awaited:
                self._answers[message[0]] = message

    def take(self, number: int) -> Message | None:
        """The answer to a question, once."""
        answer = self._answers.pop(number, None)
        if answer is not None:
            self._awaited.discard(number)
        return answer

    def lost(self, number: int) -> bool:
        """Whether the answer can not come any more, as the connection it was asked over is gone."""
        return number not in self._awaited

    def give_up(self, number: int, since: float) -> None:
        """Do not wait for this answer any more."""
        if number in self._awaited:
            self._awaited.discard(number)
            self._unanswered[number] = since

    def well(self) -> None:
        """The actor answered in time."""
        self._pause_s = self._next_try = 0.0

    def rest(self, now: float) -> None:
        """Leave the actor alone for a while, twice as long as last time."""
        self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        self._next_try = now + self._pause_s

    def close(self) -> None:
        """Hang up for good."""
        self._closed.set()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _lose(self) -> None:
        """The connection is no good: forget what was asked over it, and seek another."""
        assert self._connection is not None
        self._connection.close()
        self._connection = None
        self._awaited.clear()
        self._unanswered.clear()
        self._answers.clear()
        self._seek()

    def _seek(self) -> None:
        if not self._closed.is_set():
            threading.Thread(target=self._seek_until_found, daemon=True, name="seek-actor").start()

    def _seek_until_found(self) -> None:
        pause = _FIRST_PAUSE_S
        while not self._closed.is_set():
            connection = self._connect()
            if connection is not None:
                self._pause_s = self._next_try = 0.0
                self._connection = connection
                return
            self._closed.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
