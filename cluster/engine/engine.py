"""The engine: requests in, verified tokens out, one step at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cluster.decoding.constraint import Constraint
from cluster.decoding.drafting import Draft, Drafter
from cluster.decoding.methods import MissingCorpus
from cluster.decoding.ngram_index import NgramIndex
from cluster.decoding.params import Method, SamplingParams, Speculation
from cluster.decoding.prediction import Prediction
from cluster.decoding.ranking import Ranking
from cluster.decoding.sampling import SamplingState, log_probabilities
from cluster.decoding.tree import SOURCES, DraftTree
from cluster.decoding.verification import Walk, verify
from cluster.engine.attention import Segment
from cluster.engine.config import EngineConfig
from cluster.engine.detokenizer import Detokenizer
from cluster.engine.draft_stage import DraftStage
from cluster.engine.kv_cache import KVPool
from cluster.engine.scheduler import Scheduler, Work
from cluster.engine.sequence import FinishReason, RequestOutput, StepDelta
from cluster.engine.sequence import Sequence as EngineSequence
from cluster.engine.stats import EngineStats
from cluster.engine.step_probe import StepProbe
from cluster.engine.step_times import StepTimes
from cluster.engine.target_model import TargetModel
from cluster.models import LoadedModel
from cluster.retrieval.lookup import CorpusLookup

_SCORED_AT_ONCE = 64  # prompt positions whose log-probabilities are computed together, which bounds the memory


class RequestError(ValueError):
    """A request that cannot be served as it is; the message says why and what to change."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt (token ids) with what is asked for it.

    Attributes:
        prediction: token ids that the answer is expected to repeat for the most part; drafts are taken from it.
        constraint: what the answer's tokens may be; an object of this request alone.
    """

    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    speculation: Speculation = field(default_factory=Speculation)
    request_id: str | None = None
    prediction: Sequence[int] = ()
    constraint: Constraint | None = None


class Engine:
    """Runs requests through a target model with speculative decoding. Not thread-safe; see ``AsyncEngine``."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig | None = None,
        corpus: CorpusLookup | None = None,
        drafters: Mapping[Method, Drafter] | None = None,
    ) -> None:
        """Allocate the KV pool and get the model ready.

        Args:
            loaded: the target model.
            config: limits and budgets.
            corpus: what methods may draft from beside the context.
            drafters: what drafts for these methods instead of drafters of this engine's own.

        Raises:
            ModelError: the model's attention cannot be verified in a tree.
        """
        self.loaded = loaded
        self.config = config or EngineConfig()
        self.stats = EngineStats()
        self.max_model_len = min(loaded.max_model_len, self.config.max_model_len or loaded.max_model_len)
        self._vocabulary = loaded.model.config.get_text_config().vocab_size
        self._target = TargetModel(loaded, self.config)
        self._pool = self._allocate_pool()
        self._target.use_store(self._pool)
        self._sequences: dict[str, EngineSequence] = {}
        self._times = StepTimes(StepProbe(self._target, self._pool), min(self.max_model_len, self.kv_rows) // 2)
        self._scheduler = Scheduler(self._pool, self.config, self._times)
        self._stage = DraftStage(self._vocabulary, loaded.device.type != "cpu", self._times, corpus, drafters or {})
        self._ids = itertools.count()

    @property
    def has_work(self) -> bool:
        """True while a request is waiting or running."""
        return bool(self._sequences)

    @property
    def load(self) -> tuple[int, int]:
        """(running, waiting) sequences."""
        return len(self._scheduler.running), len(self._scheduler.waiting)

    @property
    def kv_bytes(self) -> int:
        """Memory for the keys and values of a token, all layers together."""
        return KVPool.bytes_per_row(self._target.shapes, self.loaded.dtype)

    @property
    def kv_rows(self) -> int:
        """Tokens the KV pool can hold."""
        return self._pool.allocator.capacity

    def capacity(self, speculation: Speculation) -> int:
        """Most nodes of a draft tree, where the request leaves it to the method as well."""
        return self._stage.capacity(speculation)

    def use_memory(self, name: str) -> None:
        """Draft from what methods learn under this name, and from no other request.

        Repeats of a measurement keep apart by it what each of them learns.
        """
        self._stage.use_memory(name)

    def step_seconds(self, widths: Sequence[int], context: int = 0) -> list[float]:
        """How long steps of so many tokens take, over so many tokens of context; measured at the first use."""
        self._times.measure_once()
        return self._times.predict(np.array(widths, np.float64), context).tolist()

    def add(self, request: Request) -> str:
        """Queue a request; returns its id.

        Raises:
            RequestError: empty or too long a prompt, a token id outside the vocabulary, a duplicate id, a method
                that needs a corpus without one.
        """
        request_id = request.request_id if request.request_id is not None else self._new_id()
        if request_id in self._sequences:
            raise RequestError(f"request id {request_id!r} is in use; give each request an id of its own")
        try:
            self._stage.drafter(request.speculation.method)
        except MissingCorpus as error:
            raise RequestError(str(error)) from error
        sequence = self._make_sequence(request_id, request)
        self._sequences[request_id] = sequence
        self._scheduler.waiting.append(sequence)
        return request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """Cancel a request and free its memory; what it had emitted, or None if it is not here (any more)."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._finish(sequence, FinishReason.ABORT)

    def generate(self, requests: Iterable[Request]) -> list[RequestOutput]:
        """Run requests to their end, batched; outputs in the order of the requests.

        Raises:
            RequestError: one of the requests cannot be served; none has been run then.
        """
        order: list[str] = []
        try:
            for request in requests:
                order.append(self.add(request))
        except Exception:
            for request_id in order:
                self.abort(request_id)
            raise
        outputs: dict[str, RequestOutput] = {}
        while not all(request_id in outputs for request_id in order):
            outputs.update({d.request_id: d.output for d in self.step() if d.output is not None})
        return [outputs[request_id] for request_id in order]

    def step(self) -> list[StepDelta]:
        """One forward pass of the target model over the running batch, and what it emitted."""
        watch = self.stats.stopwatch
        watch.start()
        began = watch.mark
        works = self._scheduler.plan()
        watch.lap("other")
        if not works:
            return []
        drafts = self._stage.propose([w for w in works if w.is_ready], sum(w.chain for w in works))
        watch.lap("draft")
        ready, segments, keep = self._pack(works, [d.tree for d in drafts])
        scored = _scored_rows(works, segments)
        batch = self._target.lay_out(segments)
        watch.lap("mask")
        logits = self._target.forward(batch, np.concatenate([keep, *(rows for _, rows in scored)]))
        watch.lap("forward")
        _score_prompts(scored, logits[len(keep) :])
        logits = logits[: len(keep)]
        ranking = Ranking(logits, self._stage.deepest_rank(ready))
        ranked = ranking.best(self._stage.ranks_observed(ready))
        walks = verify([d.tree for d in drafts], logits, ranked.ids[:, 0], [s.sampling for s in ready])
        self._stage.observe(ready, drafts, walks, ranked)
        watch.lap("verify")
        self._compact(ready, walks)
        watch.lap("compact")
        for work in works:
            if not work.is_ready:
                work.sequence.computed += work.chain
        kept = self._extend(ready, drafts, walks)
        watch.lap("other")
        self._stage.look_ahead(ready, ranking, walks, drafts)
        watch.lap("draft")
        deltas = [self._emit(s, walk, n) for s, walk, n in zip(ready, walks, kept, strict=True)]
        self.stats.steps += 1
        self.stats.computed_tokens += sum(s.width for s in segments)
        watch.lap("other")
        if self._times.is_measured and all(w.sequence.sampling.position for w in works):
            context = sum(s.length for s in segments)
            self._times.refine(sum(s.width for s in segments), context, watch.mark - began, len(segments))
        return deltas

    # -- parts of a step ---------------------------------------------------------------------------------------------

    def _pack(
        self, works: Sequence[Work], trees: Sequence[DraftTree]
    ) -> tuple[list[EngineSequence], list[Segment], NDArray[np.int64]]:
        """Lay out the step: (ready sequences, segments, packed positions whose logits are wanted)."""
        ready: list[EngineSequence] = []
        segments: list[Segment] = []
        keep: list[NDArray[np.int64]] = []
        remaining = iter(trees)
        at = 0
        for work in works:
            tree = next(remaining) if work.is_ready else None
            segments.append(_segment(work, tree))
            at += segments[-1].width
            if tree is not None:
                ready.append(work.sequence)
                keep.append(np.arange(at - len(tree), at))
        return ready, segments, np.concatenate(keep) if keep else np.empty(0, np.int64)

    def _compact(self, ready: Sequence[EngineSequence], walks: Sequence[Walk]) -> None:
        """Move accepted nodes' rows behind the committed ones: one copy for the batch, none if all lie right."""
        sources: list[NDArray[np.int64]] = []
        destinations: list[NDArray[np.int64]] = []
        for sequence, walk in zip(ready, walks, strict=True):
            assert sequence.extent is not None
            nodes = np.array(walk.nodes)
            root = sequence.extent.start + len(sequence.index) - 1
            moved = nodes != np.arange(len(nodes))
            sources.append(root + nodes[moved])
            destinations.append(root + np.flatnonzero(moved))
        if sources:
            self._pool.copy_rows(np.concatenate(sources), np.concatenate(destinations))

    def _extend(self, ready: Sequence[EngineSequence], drafts: Sequence[Draft], walks: Sequence[Walk]) -> list[int]:
        """Append what was accepted, find the ends, count; how many tokens of each walk are to be emitted."""
        kept = [_kept(sequence, walk) for sequence, walk in zip(ready, walks, strict=True)]
        for sequence, draft, walk, n in zip(ready, drafts, walks, kept, strict=True):
            self._count(sequence, draft, walk, n)
            sequence.computed = len(sequence.index) - 1 + len(walk.nodes)
            sequence.index.extend(np.array(walk.tokens, np.int32))
            if sequence.finish_reason is None and sequence.remaining <= 0:
                sequence.finish_reason = FinishReason.LENGTH
        return kept

    def _emit(self, sequence: EngineSequence, walk: Walk, kept: int) -> StepDelta:
        """Hand on the first ``kept`` tokens of a walk, and finish a sequence that ends with them."""
        new_ids = walk.tokens[:kept]
        new_logprobs = walk.logprobs[:kept] if walk.logprobs is not None else None
        sequence.output_ids += new_ids
        sequence.logprobs += new_logprobs or []
        self.stats.emitted_tokens += kept
        is_first = len(sequence.output_ids) == kept
        prompt = sequence.prompt_logprobs if is_first and sequence.params.prompt_logprobs is not None else None
        output = self._finish(sequence, sequence.finish_reason) if sequence.finish_reason else None
        return StepDelta(sequence.request_id, new_ids, sequence.detokenizer.take_new(), new_logprobs, output, prompt)

    def _count(self, sequence: EngineSequence, draft: Draft, walk: Walk, kept: int) -> None:
        stats = sequence.stats
        if not stats.first_token:
            self.stats.stopwatch.lap("other")
            stats.first_token = self.stats.stopwatch.mark
            return
        stats.decode_steps += 1
        stats.decode_tokens += kept
        stats.retrieved_steps += draft.retrieved
        for nodes, by_request, total in (
            (draft.tree.sources[1:], stats.drafted, self.stats.drafted),
            (draft.tree.sources[walk.nodes[1:kept]], stats.accepted, self.stats.accepted),
        ):
            for source, count in enumerate(np.bincount(nodes, minlength=len(SOURCES)).tolist()):
                if count:
                    by_request[SOURCES[source]] += count
                    total[SOURCES[source]] += count
        if len(draft.tree) > 1:
            _count_places(sequence, draft.tree, walk, kept)

    # -- requests ----------------------------------------------------------------------------------------------------

    def _new_id(self) -> str:
        return next(name for n in self._ids if (name := f"request-{n}") not in self._sequences)

    def _make_sequence(self, request_id: str, request: Request) -> EngineSequence:
        prompt = self._checked_prompt(request)
        room = self.max_model_len - len(prompt)
        params = request.params.model_copy(
            update={
                "max_new_tokens": min(request.params.max_new_tokens, room),
                "min_new_tokens": min(request.params.min_new_tokens, room),
            }
        )
        capacity = self.capacity(request.speculation)
        rows = len(prompt) + params.max_new_tokens + capacity
        if rows > self.kv_rows:
            raise RequestError(
                f"the request needs {rows} tokens of KV memory (prompt, max_new_tokens and draft tree), the engine has "
                f"{self.kv_rows}; shorten it or raise kv_cache_gib"
            )
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.loaded.stop_ids)
        return EngineSequence(
            request_id=request_id,
            prompt_tokens=len(prompt),
            params=params,
            speculation=request.speculation,
            capacity=capacity,
            index=NgramIndex(prompt, room=params.max_new_tokens),
            sampling=SamplingState(params, stop_ids, frozenset(prompt.tolist()), constraint=request.constraint),
            detokenizer=Detokenizer(self.loaded.tokenizer, params.stop),
            prediction=Prediction(np.asarray(request.prediction, np.int32)) if len(request.prediction) else None,
        )

    def _checked_prompt(self, request: Request) -> NDArray[np.int32]:
        prompt = _token_ids("the prompt", request.prompt)
        if not len(prompt):
            raise RequestError("the prompt is empty; give at least one token")
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and leaves no room in the context of {self.max_model_len}; "
                "shorten it"
            )
        ids = [("the prompt", prompt), ("logit_bias", np.array(list(request.params.logit_bias), np.int64))]
        ids.append(("prediction", _token_ids("the prediction", request.prediction)))
        ids.append(("stop_token_ids", np.array(request.params.stop_token_ids, np.int64)))
        for name, values in ids:
            wrong = values[(values < 0) | (values >= self._vocabulary)]
            if len(wrong):
                raise RequestError(f"{name} holds token id {wrong[0]}; ids go from 0 to {self._vocabulary - 1}")
        return prompt.astype(np.int32)

    def _finish(self, sequence: EngineSequence, reason: FinishReason) -> RequestOutput:
        sequence.finish_reason = reason
        sequence.detokenizer.finish()
        self.stats.stopwatch.lap("other")
        sequence.stats.finished = self.stats.stopwatch.mark
        self._scheduler.finish(sequence)
        del self._sequences[sequence.request_id]
        self.stats.finished += 1
        return sequence.to_output()

    def _allocate_pool(self) -> KVPool:
        budget = int(self.config.kv_cache_gib * 2**30)
        rows = budget // self.kv_bytes
        if rows < 2:
            raise RequestError(
                f"kv_cache_gib={self.config.kv_cache_gib} holds no token of {self.loaded.name}; raise it"
            )
        try:
            return KVPool(self._target.shapes, rows, self.loaded.dtype, self.loaded.device)
        except (RuntimeError, MemoryError) as error:  # torch reports a failed allocation as the former
            raise RequestError(
                f"no memory for kv_cache_gib={self.config.kv_cache_gib} on {self.loaded.device}; lower it"
            ) from error


def _token_ids(name: str, given: Sequence[int]) -> NDArray[np.int64]:
    """What a request gives as token ids, int64 [L]. Raises RequestError, which calls it ``name``."""
    try:
        ids = np.asarray(given)
        if ids.size and not np.issubdtype(ids.dtype, np.integer):
            raise TypeError(f"{ids.dtype} values are no ids")
        ids = ids.astype(np.int64)
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestError(f"{name} must be a list of token ids: {error}") from error
    if ids.ndim != 1:
        raise RequestError(f"{name} must be one list of token ids; make a request of each list")
    return ids


def _kept(sequence: EngineSequence, walk: Walk) -> int:
    """Put a walk's tokens into text; how many of them there are up to the one that ends the sequence."""
    before = len(sequence.output_ids)
    for i, token in enumerate(walk.tokens):
        if token in sequence.sampling.stop_ids:
            sequence.finish_reason = FinishReason.STOP
        elif sequence.detokenizer.push(token, may_stop=before + i >= sequence.params.min_new_tokens):
            sequence.finish_reason = FinishReason.STOP
            return i + 1
    return len(walk.tokens)


def _count_places(sequence: EngineSequence, tree: DraftTree, walk: Walk, kept: int) -> None:
    """Count drafted and accepted nodes by depth, and next-next guesses by rank."""
    stats = sequence.stats
    for depth, count in enumerate(np.bincount(tree.depths[1:]).tolist()):
        if count:
            stats.drafted_depths[depth] += count
    for depth in range(1, kept):
        stats.accepted_depths[depth] += 1
    if len(sequence.guesses):
        below_root = tree.tokens[tree.parents == 0]
        is_drafted = (sequence.guesses[:, None] == below_root).any(axis=1)
        stats.drafted_ranks.update((1 + np.flatnonzero(is_drafted)).tolist())
        if kept > 1:
            stats.accepted_ranks.update((1 + np.flatnonzero(sequence.guesses == walk.tokens[0])).tolist())


def _scored_rows(works: Sequence[Work], segments: Sequence[Segment]) -> list[tuple[EngineSequence, NDArray[np.int64]]]:
    """Sequences whose prompts are to be scored, with the packed positions that predict their next unscored tokens."""
    scored = []
    at = 0
    for work, segment in zip(works, segments, strict=True):
        sequence = work.sequence
        if sequence.unscored:
            first = len(sequence.prompt_logprobs) - 1 - sequence.computed
            last = min(work.chain, sequence.prompt_tokens - 1 - sequence.computed)
            scored.append((sequence, np.arange(at + first, at + max(first, last))))
        at += segment.width
    return scored


def _score_prompts(scored: Sequence[tuple[EngineSequence, NDArray[np.int64]]], logits: Tensor) -> None:
    """Append the log-probabilities of prompt tokens, from the logits [N, V] at the scored positions."""
    for sequence, rows in scored:
        start = len(sequence.prompt_logprobs)
        tokens = sequence.index.tokens[start : start + len(rows)].tolist()
        for i in range(0, len(rows), _SCORED_AT_ONCE):
            part = slice(i, i + _SCORED_AT_ONCE)
            sequence.prompt_logprobs += log_probabilities(
                logits[: len(rows)][part], tokens[part], sequence.params.prompt_logprobs or 0
            )
        logits = logits[len(rows) :]


def _segment(work: Work, tree: DraftTree | None) -> Segment:
    """Chain tokens, with the tree in place of the chain's last token where there is one."""
    sequence, lead = work.sequence, work.chain - (tree is not None)
    assert sequence.extent is not None
    tokens = sequence.index.tokens[sequence.computed : sequence.computed + lead]
    depths = np.arange(lead, dtype=np.int32)
    ancestors = None
    if tree is not None:
        tokens = np.concatenate((tokens, tree.tokens))
        depths = np.concatenate((depths, tree.depths + lead))
        if not tree.is_chain:
            ancestors = np.tri(lead + len(tree), dtype=np.bool_)
            ancestors[lead:, lead:] = tree.ancestors()
    return Segment(sequence.extent.start, sequence.computed, tokens, depths, ancestors)
