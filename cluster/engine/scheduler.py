"""Which sequences take part in a step, with how many tokens, and where their keys and values live."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

from cluster.engine.config import EngineConfig
from cluster.engine.kv_cache import Extent, KVPool
from cluster.engine.prefill import tokens_beside
from cluster.engine.prefix_cache import CachedPrefix, PrefixCache, common_prefix
from cluster.engine.sequence import Sequence
from cluster.engine.step_times import StepTimes

_GROWTH = 256  # rows reserved ahead of a sequence, so that it seldom has to move
_MARGIN = 32  # free rows a newcomer must find beside running sequences, lest it be preempted at once
_WORTH_REUSING = 8  # shortest common prefix for which copying rows beats computing them


@dataclass(frozen=True, slots=True)
class Work:
    """A sequence's part in a step: ``chain`` of its pending tokens are computed.

    If that is all of them (``is_ready``), the step chooses its next token and may draft behind the last one.
    """

    sequence: Sequence
    chain: int

    @property
    def is_ready(self) -> bool:
        return self.chain == self.sequence.pending


class Scheduler:
    """Continuous batching: first come, first served; whoever came last gives way when memory is short."""

    def __init__(self, pool: KVPool, config: EngineConfig, times: StepTimes) -> None:
        self._pool = pool
        self._config = config
        self._times = times
        self._cache = PrefixCache()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def plan(self) -> list[Work]:
        """Admit what fits and divide the step: all decoding sequences, and prompts as far as they do not stall them."""
        if not self._make_room():
            self._admit()
        decoding = [s for s in self.running if s.is_decoding]
        prompts = [s for s in self.running if not s.is_decoding]
        works = [Work(s, 1) for s in decoding]
        if prompts:
            works += _divided(
                prompts, self._beside(len(decoding), len(prompts)) if decoding else self._config.max_step_tokens
            )
        return works

    def _beside(self, decoding: int, prompts: int) -> int:
        """Prompt tokens of a step in which so many sequences decode."""
        if self._config.prefill_chunk is not None:
            return self._config.prefill_chunk
        context = sum(s.computed for s in self.running)
        return min(tokens_beside(self._times, decoding, context, prompts), self._config.max_step_tokens)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is; its keys and values stay for reuse while memory lasts."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        if sequence.extent is None:
            return
        if self._config.prefix_reuse and sequence.computed >= _WORTH_REUSING:
            self._pool.allocator.shrink(sequence.extent, sequence.computed)
            self._cache.add(CachedPrefix(sequence.index.tokens[: sequence.computed].copy(), sequence.extent))
        else:
            self._pool.allocator.free(sequence.extent)
        sequence.extent = None

    def _make_room(self) -> bool:
        """Give every running sequence the rows of its next step; true if younger ones had to be preempted for it."""
        preempted = False
        for sequence in list(self.running):
            while sequence in self.running and not self._reserve(sequence, _rows_next_step(sequence)):
                self._preempt(self.running[-1])
                preempted = True
        return preempted and bool(self.running)

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.extent is not None
        self.running.remove(sequence)
        self._pool.allocator.free(sequence.extent)
        sequence.extent = None
        sequence.computed = 0
        sequence.stats.preemptions += 1
        self.waiting.appendleft(sequence)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._config.max_sequences:
            if not self._place(self.waiting[0]):
                return
            self.running.append(self.waiting.popleft())

    def _place(self, sequence: Sequence) -> bool:
        """Find an extent, filled with the longest prefix still held; False if memory is short."""
        needed = _rows_next_step(sequence) + (min(_MARGIN, sequence.remaining) if self.running else 0)
        best, shared, owner = self._longest_prefix(sequence)
        if best is not None and owner is not None and 2 * shared >= len(owner.tokens):
            sequence.extent = self._cache.take(owner)
            sequence.computed = shared
            if self._reserve(sequence, needed):
                sequence.stats.cached_tokens += shared
                return True
            self._pool.allocator.free(sequence.extent)
            sequence.extent, sequence.computed = None, 0
            return False
        if owner is not None:
            self._cache.touch(owner)
        if not self._reserve(sequence, needed):
            return False
        assert sequence.extent is not None
        if best is not None and best.size:  # size 0: evicted while making room
            self._pool.move(best.start, sequence.extent.start, shared)
            sequence.computed = shared
            sequence.stats.cached_tokens += shared
        return True

    def _longest_prefix(self, sequence: Sequence) -> tuple[Extent | None, int, CachedPrefix | None]:
        """(extent, tokens in common, cache entry or None if a running sequence owns the extent)."""
        best: tuple[Extent | None, int, CachedPrefix | None] = (None, 0, None)
        if not self._config.prefix_reuse or sequence.unscored:
            return best
        tokens = sequence.index.tokens[:-1]  # the last token must be computed: its logits choose the next
        held = ((e.extent, e.tokens, e) for e in self._cache.entries())
        live = ((s.extent, s.index.tokens[: s.computed], None) for s in self.running)
        for extent, other, entry in itertools.chain(held, live):
            shared = common_prefix(tokens, other)
            if shared >= max(_WORTH_REUSING, best[1] + 1):
                best = (extent, shared, entry)
            if shared == len(tokens):
                break
        return best

    def _reserve(self, sequence: Sequence, rows: int) -> bool:
        """Make the sequence's extent at least ``rows`` long, moving it or evicting cached prefixes if need be."""
        extent = sequence.extent
        if extent is not None and extent.size >= rows:
            return True
        allocator = self._pool.allocator
        wanted = rows + min(_GROWTH, sequence.remaining)
        while True:
            if extent is not None and (allocator.grow(extent, wanted) or allocator.grow(extent, rows)):
                return True
            new = allocator.allocate(wanted)
            if new is None and (oldest := self._cache.pop_oldest()) is not None:
                allocator.free(oldest)
                continue
            new = new or self._allocate_packed(sequence, rows)
            if new is None:
                return False
            if extent is not None and new is not extent:
                self._pool.move(extent.start, new.start, sequence.computed)
                allocator.free(extent)
            sequence.extent = new
            return True

    def _allocate_packed(self, sequence: Sequence, rows: int) -> Extent | None:
        """Last resort: slide all extents together and try again with no reserve."""
        allocator = self._pool.allocator
        held = sequence.extent.size if sequence.extent is not None else 0
        if allocator.free_rows + held < rows:
            return None
        self._pool.defragment([s.extent for s in {*self.running, sequence} if s.extent is not None])
        if sequence.extent is not None and allocator.grow(sequence.extent, rows):
            return sequence.extent
        return allocator.allocate(rows)


def _divided(prompts: list[Sequence], budget: int) -> list[Work]:
    """A step's prompt tokens: half of them, or more if others need less, go to the prompt that came first.

    The rest goes to the shortest first, so that nobody waits for all of a long prompt that came earlier.
    """
    first, *others = prompts
    kept = min(first.pending, budget - budget // 2)
    left = budget - kept
    works = []
    for sequence in sorted(others, key=lambda s: s.pending):
        chain = min(sequence.pending, left)
        left -= chain
        if chain:
            works.append(Work(sequence, chain))
    return [Work(first, min(first.pending, kept + left)), *works]


def _rows_next_step(sequence: Sequence) -> int:
    return len(sequence.index) + sequence.capacity
