"""Tokens to text as they come, and stop strings cut where they begin."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase


class Detokenizer:
    """Incremental text of one sequence.

    ``text`` is all that may be shown; text that could still turn out to be the start of a stop string is held back.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._decoded = ""
        self._shown = 0
        self._stopped = False
        self.text = ""

    def push(self, token: int, *, may_stop: bool = True) -> bool:
        """Add a token; True if it completes a stop string, which then ends the text, if it may."""
        self._ids.append(token)
        piece = self._stream.step(self._backend, token)
        if not piece:
            return False
        checked = len(self._decoded)
        self._decoded += piece
        cut = self._find_stop(checked) if may_stop else -1
        if cut >= 0:
            self.text = self._decoded[:cut]
            self._stopped = True
            return True
        self.text = self._decoded[: len(self._decoded) - self._held_back()]
        return False

    def finish(self) -> None:
        """No more tokens come: release what was held back, incomplete characters as replacement characters."""
        if self._stopped:
            return
        whole = str(self._tokenizer.decode(self._ids, skip_special_tokens=True))
        self.text = whole if whole.startswith(self._decoded) else self._decoded

    def take_new(self) -> str:
        """Text that became showable since the last call."""
        new = self.text[self._shown :]
        self._shown = max(self._shown, len(self.text))
        return new

    def _find_stop(self, checked: int) -> int:
        """Where the earliest stop string begins that ends after ``checked`` characters, or -1."""
        found = [self._decoded.find(s, max(0, checked - len(s) + 1)) for s in self._stop]
        return min((at for at in found if at >= 0), default=-1)

    def _held_back(self) -> int:
        """Length of the longest end of the text that is a proper start of a stop string."""
        longest = max((len(s) - 1 for s in self._stop), default=0)
        for n in range(min(longest, len(self._decoded)), 0, -1):
            if any(s.startswith(self._decoded[-n:]) for s in self._stop):
                return n
        return 0
