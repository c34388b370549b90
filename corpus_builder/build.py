"""Building a corpus and appending to one: the steps, and what a broken-off build left (docs/corpus.md §5)."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from cluster.models import ModelError, load_tokenizer, tokenizer_fingerprint
from cluster.retrieval import CorpusError, Manifest
from cluster.retrieval.manifest import (
    MANIFEST_NAME,
    ShardEntry,
    TokenFileEntry,
    TokenizerEntry,
    corpus_id,
)
from cluster.retrieval.storage import Location, read_manifest
from corpus_builder.job import WORK_FOLDER, Job
from corpus_builder.plan import Plan, make_plan
from corpus_builder.pruning import choose_cut
from corpus_builder.ray_steps import ray_session, run_step
from corpus_builder.requests import BuildRequest, Execution, Kind
from corpus_builder.shard_steps import AggregateStep, FragmentStep, PruneStep
from corpus_builder.tokenize_step import TokenizeStep
from corpus_builder.work_files import exists, names_in, put, remove

MB = 1 << 20
# Of a worker that aggregates, measured: the process itself, and its arrays at their largest.
_WORKER_BYTES = 600 * MB
_BYTES_A_POSITION = 150
_BYTES_A_TEXT_TOKEN = 15
_OWN_FILES = re.compile(r"(tokens|fragments|aggregate|shard)-\d{5,}(\.g\d+)?\.(arrow|npz)|\.[\w.-]+\.[0-9a-f]{32}\.tmp")
_SKEW = 1.5  # of the largest shard over the mean one, expected when their number is chosen


@dataclass(frozen=True, slots=True)
class _Base:
    """What the corpus in `out` brings into a build: nothing, or the documents that new ones are appended to."""

    token_files: tuple[TokenFileEntry, ...] = ()
    problems: Counter[str] | None = None
    vocabulary: int = 1


def build(request: BuildRequest, execution: Execution) -> Manifest:
    """Build a corpus and return its manifest. Raises CorpusError."""
    out = Location.parse(request.out)
    old = _existing(out)
    if old is not None and not request.overwrite:
        raise CorpusError(f"{out.text} holds a corpus already; append to it, name another, or use --overwrite")
    job = Job(
        request.out,
        request.tokenizer,
        request.fields,
        request.parameters,
        request.shards or 0,
        old.generation + 1 if old else 0,
        request.keep_tokens,
    )
    plan = make_plan(request.inputs, request.kind, request.fields)
    tokenizer = tokenizer_of(request.tokenizer)
    return _make(job, plan, tokenizer, _described(request.tokenizer, tokenizer), execution, _Base(), old)


def append(
    directory: str,
    inputs: Sequence[str],
    execution: Execution,
    fields: tuple[str, ...] | None = None,
    kind: Kind | None = None,
) -> Manifest:
    """Add documents to a corpus: the shards become those of a build over the old and then the new documents.

    Raises CorpusError.
    """
    old = read_manifest(Location.parse(directory))
    if old.token_files is None:
        raise CorpusError(f"{directory} was built with --no-keep-tokens, so nothing can be appended; build it anew")
    name = old.tokenizer.name
    job = Job(directory, name, fields, old.parameters, len(old.shards), old.generation + 1, True)
    tokenizer = tokenizer_of(name)
    described = _described(name, tokenizer)
    if described.fingerprint != old.tokenizer.fingerprint:
        raise CorpusError(
            f"{directory} was built with a tokenizer {old.tokenizer.fingerprint}, but {name} now has "
            f"{described.fingerprint}; build the corpus anew"
        )
    base = _Base(old.token_files, Counter(old.problems), old.vocabulary)
    return _make(job, make_plan(inputs, kind, fields), tokenizer, described, execution, base, old)


def _existing(out: Location) -> Manifest | None:
    return read_manifest(out) if exists(out.child(MANIFEST_NAME)) else None


def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model. Raises CorpusError."""
    try:
        return load_tokenizer(name)
    except ModelError as error:
        raise CorpusError(str(error)) from error


def _described(name: str, tokenizer: PreTrainedTokenizerBase) -> TokenizerEntry:
    template = tokenizer.chat_template
    digest = None
    if template:
        digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()
    return TokenizerEntry(name=name, fingerprint=tokenizer_fingerprint(tokenizer), chat_template_sha256=digest)


def _make(
    job: Job,
    plan: Plan,
    tokenizer: PreTrainedTokenizerBase,
    described: TokenizerEntry,
    execution: Execution,
    base: _Base,
    old: Manifest | None,
) -> Manifest:
    """All steps. Files of `old` stay until the new manifest is there."""
    with _only_builder(job), ray_session(execution.ray_address, execution.workers):
        if _existing(job.directory) != old:
            raise CorpusError(f"another build has changed {job.out} in the meantime; start this one again")
        _forget_stale(job, _step_keys(job, plan, described, base), old)
        new = _tokenize(job, plan, described.fingerprint, execution)
        token_files = (*base.token_files, *(entry for entry, _, _ in new))
        problems = Counter(base.problems or {}) + Counter(plan.problems)
        for _, _, counts in new:
            problems.update(counts)
        if not any(file.documents for file in token_files):
            found = ", ".join(f"{count} × {kind}" for kind, count in sorted(problems.items()))
            raise CorpusError(f"no document was found in the input ({found or 'it is empty'})")
        sources = [*(job.directory.child(f.name).text for f in base.token_files), *_token_texts(job, plan)]
        choices = [job.shards] if job.shards else _shard_numbers(token_files, execution)
        for choice in choices:
            job = replace(job, shards=choice)
            _forget_stale(job, _step_keys(job, plan, described, base), old)
            totals = run_step(FragmentStep(job), sources, execution.workers, "partition")
            needed = _memory_needed(job, totals)
            if max(needed) <= execution.memory_mb * MB:
                break
        else:
            raise _too_large(needed, execution)
        shards, min_count = _aggregate(job, len(sources), execution)
        largest = max([base.vocabulary - 1, len(tokenizer) - 1, *(largest for _, largest, _ in new)])
        manifest = Manifest(
            corpus_id=corpus_id(described.fingerprint, [shard.sha256 for shard in shards]),
            tokenizer=described,
            vocabulary=largest + 1,
            parameters=job.parameters,
            effective_min_count=min_count,
            documents=sum(file.documents for file in token_files),
            tokens=sum(file.tokens for file in token_files),
            positions=sum(shard.positions for shard in shards),
            ngrams=sum(shard.ngrams for shard in shards),
            entries=sum(shard.entries for shard in shards),
            generation=job.generation,
            problems=dict(sorted(problems.items())),
            shards=tuple(shards),
            token_files=token_files if job.keep_tokens else None,
        )
        put(job.directory.child(MANIFEST_NAME), lambda path: _write_text(path, manifest.to_json()))
        _clean_up(job, manifest)
    return manifest


@contextmanager
def _only_builder(job: Job) -> Iterator[None]:
    """Keep other builds out of a local directory."""
    directory = job.directory.local
    if directory is None:
        yield
        return
    try:
        (directory / WORK_FOLDER).mkdir(parents=True, exist_ok=True)
        with FileLock(directory / WORK_FOLDER / "lock", timeout=0):
            yield
    except Timeout as error:
        raise CorpusError(f"another build is writing to {job.out}; wait for it or name another directory") from error
    except OSError as error:
        raise CorpusError(f"cannot write to {job.out}: {error.strerror or error}") from error


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _step_keys(job: Job, plan: Plan, described: TokenizerEntry, base: _Base) -> dict[str, str]:
    """For each step a hash of all that its files depend on."""
    before: Any = [
        job.generation,
        job.keep_tokens,
        plan.model_dump(mode="json"),
        job.fields,
        described.model_dump(),
        [file.sha256 for file in base.token_files],
    ]
    keys = {}
    parameters = job.parameters
    for step, more in (
        ("tokens", [parameters.sizes[0]]),
        ("fragments", [parameters.sizes, parameters.depth, job.shards]),
        ("shards", parameters.model_dump(mode="json")),
    ):
        before = hashlib.sha256(json.dumps([before, more]).encode()).hexdigest()
        keys[step] = before
    return keys


def _forget_stale(job: Job, keys: dict[str, str], old: Manifest | None) -> None:
    """Delete what an earlier, broken-off build left for other input or other parameters, and note this one's."""
    note = job.work.child("steps.json")
    before = json.loads(note.read_bytes()) if exists(note) else {}
    same = {step for step, key in keys.items() if before.get(step) == key}
    listed = {MANIFEST_NAME}
    if old is not None:
        listed |= {file.name for file in (*old.shards, *(old.token_files or ()))}
    for folder in (job.directory, job.work):
        for name in sorted(names_in(folder) - listed):
            if not _belongs_to(name, same) and _is_ours(name):
                remove(folder.child(name))
    put(note, lambda path: _write_text(path, json.dumps(keys)))


def _is_ours(name: str) -> bool:
    return _OWN_FILES.fullmatch(name) is not None


def _belongs_to(name: str, steps: set[str]) -> bool:
    step = {"tokens": "tokens", "fragments": "fragments", "aggregate": "shards", "shard": "shards"}
    return step.get(name.partition("-")[0]) in steps


def _tokenize(
    job: Job, plan: Plan, fingerprint: str, execution: Execution
) -> list[tuple[TokenFileEntry, int, dict[str, int]]]:
    """The new token files, with the largest token id and the problems of each."""
    results = run_step(
        TokenizeStep(job, fingerprint),
        [partition.model_dump() for partition in plan.partitions],
        execution.workers,
        "tokenize",
        lambda result: int(result["entry"]["tokens"]),
    )
    return [(TokenFileEntry(**r["entry"]), int(r["largest"]), r["problems"]) for r in results]


def _token_texts(job: Job, plan: Plan) -> list[str]:
    return [job.token_file(number).text for number in range(len(plan.partitions))]


def _shard_numbers(token_files: Sequence[TokenFileEntry], execution: Execution) -> list[int]:
    """Numbers of shards to try: as few as fit into memory if none is much larger than the others, then more."""
    tokens = sum(file.tokens for file in token_files)
    shards = 1
    while _needed(_SKEW * tokens / shards, min(shards, 14) * tokens / shards) > execution.memory_mb * MB:
        shards += 1
    return [shards, 3 * shards, 9 * shards]


def _needed(positions: float, text: float) -> float:
    """Bytes of a worker that aggregates a shard with this many positions and tokens of text."""
    return _WORKER_BYTES + positions * _BYTES_A_POSITION + text * _BYTES_A_TEXT_TOKEN


def _memory_needed(job: Job, totals: Sequence[Sequence[tuple[int, int]]]) -> list[float]:
    """For each shard the bytes of the worker that aggregates it; `totals` count text and positions by file."""
    return [
        _needed(sum(file[shard][1] for file in totals), sum(file[shard][0] for file in totals))
        for shard in range(job.shards)
    ]


def _too_large(needed: Sequence[float], execution: Execution) -> CorpusError:
    worst, bound = max(needed), execution.memory_mb * MB
    share = (worst - _WORKER_BYTES) / max(bound - _WORKER_BYTES, MB)
    more = int(len(needed) * share * 1.2) + 1
    advice = f"use --shards {more} or more, or --memory {int(worst / MB) + 1} or more"
    if worst > 3 * sum(needed) / len(needed):
        advice += "; n-grams that end in one very common token fill this shard: with --sizes 2,3,4 they spread"
    return CorpusError(
        f"a shard needs {int(worst / MB)} MB, more than the {execution.memory_mb} MB a worker may use; {advice}. "
        "What is tokenized so far is kept for the next try"
    )


def _aggregate(job: Job, token_files: int, execution: Execution) -> tuple[list[ShardEntry], int]:
    """The shards, and the count that n-grams must have to be in them."""
    everything = [None] * job.shards
    entries = run_step(AggregateStep(job, token_files), everything, execution.workers, "aggregate")
    min_count = job.parameters.min_count
    if job.parameters.max_bytes is not None:
        cut = choose_cut(job, execution.workers)
        min_count = cut.min_count
        entries = run_step(PruneStep(job, cut), everything, execution.workers, "prune")
    return [ShardEntry(**entry) for entry in entries], min_count


def _clean_up(job: Job, manifest: Manifest) -> None:
    """Delete work files, and corpus files that the new manifest does not list."""
    listed = {file.name for file in (*manifest.shards, *(manifest.token_files or ()))}
    for name in sorted(names_in(job.directory) - listed):
        if _is_ours(name):
            remove(job.directory.child(name))
    remove(job.work)
