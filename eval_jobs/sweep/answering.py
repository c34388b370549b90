"""One process's part of a sweep: a loaded model, and every method's answers from it. No Ray in here."""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cluster.decoding.adaptive import LARGEST_TREE, Adaptive
from cluster.decoding.params import METHODS, SamplingParams, Speculation
from cluster.decoding.ranking import Ranking
from cluster.engine import Engine, EngineConfig, Request, RequestError, RequestOutput
from cluster.models import LoadedModel, ModelConfig, ModelError, load_model, render_chat, tokenizer_fingerprint
from cluster.retrieval import Corpus, CorpusLookup
from eval_jobs.benchmarks import Task
from eval_jobs.rejections import Recorder, Rejections
from eval_jobs.rows import STEP_WIDTHS, Row, Trace
from eval_jobs.sweep.settings import SweepSettings
from eval_jobs.systems import HF_SYSTEMS, HuggingFaceSystem

MOST_RANKS = 60  # next-next guesses looked at
TRACED = 64  # logits kept of each answer token
_HF_LOOKUP_TOKENS = 10
_WARM_UP_TOKENS = 12
_WARM_UP_REPEAT = -1


@dataclass(slots=True)
class _Running:
    """A request in the engine and what has arrived of it."""

    row: Row
    chunk_tokens: list[int] = field(default_factory=list)
    chunk_seconds: list[float] = field(default_factory=list)
    output: RequestOutput | None = None


class Answerer:
    """Answers tasks by any of a sweep's methods. Ours share one engine; Hugging Face has a model that nobody optimises.

    Raises (when made):
        ModelError, CorpusError, RequestError: the model, the corpus or the settings are unusable.
    """

    def __init__(self, settings: SweepSettings, methods: Sequence[str]) -> None:
        self._settings = settings
        config = ModelConfig(model=settings.model, dtype=settings.dtype, device=settings.device)
        self._loaded = load_model(config)
        wants_hf = any(m in HF_SYSTEMS for m in methods)
        self._reference = load_model(config) if wants_hf else self._loaded
        # Prefix reuse off: a method must not profit from the prompt that the method before it computed.
        engine_config = EngineConfig(max_sequences=settings.concurrency, prefix_reuse=False)
        corpus = _open_corpus(settings, self._loaded)
        vocabulary = self._loaded.model.config.get_text_config().vocab_size
        self._recorder = Recorder(Adaptive(vocabulary, corpus))
        self._engine = Engine(self._loaded, engine_config, corpus, {"adaptive": self._recorder})
        self._hf = {
            name: HuggingFaceSystem(self._reference, _HF_LOOKUP_TOKENS if name == "hf_pld" else None)
            for name in HF_SYSTEMS
            if name in methods
        }
        self._warm_up(methods)

    @property
    def device(self) -> str:
        """The kind of device: a GPU's name, or ``cpu``."""
        device = self._loaded.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

    @property
    def dtype(self) -> str:
        """The type that ``auto`` came to."""
        return str(self._loaded.dtype).removeprefix("torch.")

    def answer(self, tasks: Sequence[Task], method: str, repeat: int) -> list[Row]:
        """All turns of all tasks, the tasks side by side: turn 2 follows the method's own answer to turn 1.

        A turn that cannot be answered becomes a row with its error, and so do the turns after it.
        """
        self._engine.use_memory(f"repeat {repeat}")  # a repeat must not profit from the one before it
        history: dict[str, list[dict[str, str]]] = {task.id: [] for task in tasks}
        rows: list[Row] = []
        for turn in range(max(len(task.turns) for task in tasks)):
            asked = [task for task in tasks if turn < len(task.turns)]
            new = [Row(t.bench, t.id, turn, method, repeat, t.category, t.group) for t in asked]
            failed = {row.question for row in rows if row.error is not None}
            for task, row in zip(asked, new, strict=True):
                history[task.id].append({"role": "user", "content": task.turns[turn]})
                self._begin(row, history[task.id], task.id in failed)
            self._run([row for row in new if row.error is None], method, repeat)
            for row in new:
                history[row.question].append({"role": "assistant", "content": row.text})
            rows += new
        return rows

    def trace(self, row: Row) -> Trace:
        """What the target thinks of the answer of this row: one plain pass over prompt and answer.

        Where traces are recorded, the answer is also made again with adaptive drafts, to look beside it.
        """
        logits = self._logits(row.prompt_ids + row.output_ids[:-1], len(row.output_ids))
        best = Ranking(logits).best(TRACED).ids
        ranks = [rank_of_next(best[i], row.output_ids[i], row.output_ids[i + 1]) for i in range(len(best) - 1)]
        trace = Trace(row.bench, row.question, row.turn, row.group, row.prompt_ids, row.output_ids, ranks)
        if self._settings.record_traces:
            values = torch.gather(logits, 1, torch.as_tensor(best, dtype=torch.int64, device=logits.device))
            trace.top_ids, trace.top_logits = best.ravel().tolist(), values.ravel().tolist()
            beside = self._rejections(row)
            trace.rejected_parents, trace.rejected_tokens = beside.parents, beside.tokens
            trace.rejected_ids, trace.rejected_gaps = beside.ids, beside.gaps
        return trace

    def gap(self, context: Sequence[int], one: int, other: int) -> float:
        """Difference of two candidates' logits after ``context``."""
        logits = self._logits(context, 1)[-1]
        return float((logits[one] - logits[other]).abs())

    def step_ms(self) -> dict[int, float]:
        """Milliseconds of a step by its width."""
        return {w: 1000 * s for w, s in zip(STEP_WIDTHS, self._engine.step_seconds(STEP_WIDTHS), strict=True)}

    # -- parts -------------------------------------------------------------------------------------------------------

    def _begin(self, row: Row, messages: list[dict[str, str]], has_failed: bool) -> None:
        row.started, row.device, row.dtype = time.time(), self.device, self.dtype
        if has_failed:
            row.error = "an earlier turn failed"
            return
        try:
            row.prompt_ids = render_chat(self._loaded.tokenizer, messages)
        except ModelError as error:
            row.error = str(error)

    def _run(self, rows: Sequence[Row], method: str, repeat: int) -> None:
        params = self._params(repeat)
        self._reset_memory()
        try:
            if method in self._hf:
                for row in rows:
                    self._run_hf(row, params)
            else:
                self._run_engine(rows, method, params)
        except Exception as error:  # whatever a model does to a prompt: the row says so, the sweep goes on
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            for row in rows:
                if not row.output_ids:
                    row.error = f"{type(error).__name__}: {error}".splitlines()[0]
        for row in rows:
            row.memory_bytes = self._peak_memory()

    def _params(self, repeat: int) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=self._settings.max_new_tokens, temperature=self._settings.temperature, seed=repeat
        )

    def _run_hf(self, row: Row, params: SamplingParams) -> None:
        room = self._loaded.max_model_len - len(row.prompt_ids)
        if room < 1:
            row.error = f"the prompt has {len(row.prompt_ids)} tokens, the model's context {self._loaded.max_model_len}"
            return
        short = params.model_copy(update={"max_new_tokens": min(params.max_new_tokens, room)})
        done = self._hf[row.method].generate(row.prompt_ids, short)
        row.output_ids, row.seconds, row.busy_seconds = done.token_ids, done.seconds, done.seconds
        row.chunk_tokens, row.chunk_seconds, row.decode_steps = done.chunk_tokens, done.chunk_seconds, done.decode_steps
        ended = bool(done.token_ids) and done.token_ids[-1] in self._loaded.stop_ids
        row.finish_reason = "stop" if ended else "length"
        row.text = str(self._loaded.tokenizer.decode(done.token_ids, skip_special_tokens=True))

    def _run_engine(self, rows: Sequence[Row], method: str, params: SamplingParams) -> None:
        speculation = Speculation(method=next(m for m in METHODS if m == method), capacity=self._settings.capacity)
        before = self._engine.stats.stopwatch.seconds
        if speculation.is_sized:
            expected = [self._expected_steps(row) for row in rows]
        start = time.perf_counter()
        running = {}
        for row in rows:
            try:
                running[self._engine.add(Request(row.prompt_ids, params, speculation))] = _Running(row)
            except RequestError as error:
                row.error = str(error)
        try:
            while self._engine.has_work:
                for delta in self._engine.step():
                    request = running[delta.request_id]
                    request.chunk_tokens.append(len(delta.token_ids))
                    request.chunk_seconds.append(time.perf_counter() - start)
                    request.output = delta.output
        finally:
            for request_id in running:
                self._engine.abort(request_id)
        seconds = time.perf_counter() - start
        after = self._engine.stats.stopwatch.seconds
        parts = {part: after[part] - before[part] for part in after}
        tokens = sum(sum(r.chunk_tokens) for r in running.values())
        for request in running.values():
            _fill(request, seconds, parts, sum(request.chunk_tokens) / tokens)
        if speculation.is_sized:
            for row, first in zip(rows, expected, strict=True):
                row.step_seconds = np.mean([first, self._expected_steps(row)], axis=0).tolist()

    def _expected_steps(self, row: Row) -> list[float]:
        """Seconds of steps of ``STEP_WIDTHS`` over the row's tokens so far, as the engine expects them now."""
        return self._engine.step_seconds(STEP_WIDTHS, len(row.prompt_ids) + len(row.output_ids))

    def _warm_up(self, methods: Sequence[str]) -> None:
        """Compile, pack and load what the first answers would otherwise wait for."""
        task = Task(bench="", id="", category="", group="", turns=("Count: one two one two one two",))
        asked, self._settings = self._settings, self._settings.model_copy(update={"max_new_tokens": _WARM_UP_TOKENS})
        for method in methods:
            self.answer([task], method, _WARM_UP_REPEAT)
        self._settings = asked

    def _rejections(self, row: Row) -> Rejections:
        """What the target thinks at tokens that adaptive drafting guesses wrong on the way to this answer."""
        self._engine.use_memory("")  # the recorder's, which no measured answer drafts from
        self._recorder.verified.clear()
        speculation = Speculation(method="adaptive", capacity=self._settings.capacity or LARGEST_TREE)
        self._engine.generate([Request(row.prompt_ids, self._params(row.repeat), speculation)])
        return Rejections.on_the_way(row.output_ids, self._recorder.verified)

    @torch.inference_mode()
    def _logits(self, ids: Sequence[int], keep: int) -> torch.Tensor:
        """Float32 [keep, V]: raw logits after the last ``keep`` tokens."""
        row = torch.tensor([list(ids)], device=self._reference.device)
        logits: torch.Tensor = self._reference.model(row, logits_to_keep=keep).logits[0]
        return logits.float()

    def _reset_memory(self) -> None:
        if self._loaded.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._loaded.device)

    def _peak_memory(self) -> int:
        if self._loaded.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._loaded.device)
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _open_corpus(settings: SweepSettings, loaded: LoadedModel) -> CorpusLookup | None:
    if settings.corpus is None:
        return None
    fingerprint = tokenizer_fingerprint(loaded.tokenizer)
    if settings.retrieval == "local":
        return Corpus.open(settings.corpus, tokenizer_fingerprint=fingerprint)
    from cluster.retrieval import client  # imports Ray, which only this way of asking needs

    return client.open_corpus(client.RetrievalConfig(corpus=settings.corpus, mode="actors"), fingerprint)


def _fill(request: _Running, batch_seconds: float, parts: dict[str, float], share: float) -> None:
    """Copy what the engine reports into the row; the batch's time is shared out by tokens."""
    row, output = request.row, request.output
    assert output is not None
    stats = output.stats
    row.output_ids, row.text, row.finish_reason = output.token_ids, output.text, str(output.finish_reason)
    row.chunk_tokens, row.chunk_seconds = request.chunk_tokens, request.chunk_seconds
    row.seconds, row.busy_seconds = request.chunk_seconds[-1], batch_seconds * share
    row.decode_steps, row.retrieved_steps = stats.decode_steps, stats.retrieved_steps
    row.drafted, row.accepted = dict(stats.drafted), dict(stats.accepted)
    row.drafted_depths, row.accepted_depths = dense(stats.drafted_depths), dense(stats.accepted_depths)
    row.drafted_ranks, row.accepted_ranks = dense(stats.drafted_ranks), dense(stats.accepted_ranks)
    row.part_seconds = {part: value * share for part, value in parts.items()}


def dense(counts: Counter[int]) -> list[int]:
    """Counts of 1, 2, 3, … as a list."""
    return [counts[i] for i in range(1, max(counts, default=0) + 1)]


def rank_of_next(best: np.ndarray, chosen: int, following: int) -> int:
    """Rank from 1 of the token after ``chosen`` among the ids ranked by the logits that chose it; 0 if too low."""
    guesses = best[best != chosen][:MOST_RANKS]
    found = np.flatnonzero(guesses == following)
    return int(found[0]) + 1 if len(found) else 0
