"""All figures of a run, by method and group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval_jobs.benchmarks import Task
from eval_jobs.metrics.acceptance import (
    Counts,
    by_depth,
    by_rank,
    by_source,
    mean_accepted_tokens,
    next_next_hit_rate,
    retrieval_success,
    steps_reaching,
    time_share,
)
from eval_jobs.metrics.accuracy import TaskId, score
from eval_jobs.metrics.exactness import Exactness, exactness
from eval_jobs.metrics.pairs import compared, is_comparable
from eval_jobs.metrics.speed import (
    Speedup,
    inter_token_latency,
    speedup,
    step_latency,
    time_to_first_token,
    tokens_per_second,
)
from eval_jobs.rows import Divergence, Key, Row
from eval_jobs.run_directory import RunDirectory, RunError

OVERALL = "overall"
BASELINES = ("hf", "vanilla")


@dataclass(frozen=True, slots=True)
class Figures:
    """A method on a group of tasks; None and empty where nothing is known. Seconds, bytes, shares of one."""

    answers: int
    failed: int
    tokens: int
    tokens_per_second: float | None
    speedups: dict[str, Speedup]
    mean_accepted_tokens: float | None
    retrieval_success: float | None
    ttft: dict[str, float] | None
    itl: dict[str, float] | None
    step: dict[str, float] | None
    memory_bytes: int
    exactness: Exactness | None
    accuracy: tuple[int, int] | None
    sources: dict[str, Counts]
    depths: list[Counts]
    ranks: list[Counts]
    reaching: list[float]
    time_share: dict[str, float]


@dataclass(frozen=True, slots=True)
class Summary:
    """A run.

    Attributes:
        methods: figures by method and group; the group ``overall`` is all of them.
        hit_rates: next-next hit rate for k = 1 … 60, by group.
        failures: what failed: (method, benchmark, question, error).
    """

    name: str
    settings: dict[str, Any]
    devices: list[str]
    dtype: str
    machines: int
    tasks: int
    repeats: int
    groups: list[str]
    methods: dict[str, dict[str, Figures]]
    hit_rates: dict[str, list[float]]
    failures: list[tuple[str, str, str, str]]


def summarize(run: RunDirectory, run_code: bool = False) -> Summary:
    """Read a run and work its figures out.

    Raises:
        RunError: there is no run, or it has no rows yet.
    """
    settings, rows = run.settings, run.rows.read()
    if not rows:
        raise RunError(f"{run.path} has no rows yet")
    tasks = {(t.bench, t.id): t for t in run.tasks}
    groups = list(dict.fromkeys(t.group for t in tasks.values()))
    traces = run.traces.read()
    divergences = {d.key: d for d in run.divergences.read()}
    temperature = float(settings.get("temperature", 0.0))
    pairs = [p for p in compared(rows) if is_comparable(p[0].method, temperature)]
    methods = list(dict.fromkeys(sorted((r.method for r in rows), key=_order)))
    names = [*groups, OVERALL]
    return Summary(
        name=run.name,
        settings=settings,
        devices=sorted({r.device for r in rows if r.device}),
        dtype=next((r.dtype for r in rows if r.dtype), "?"),
        machines=len({r.node.partition("/")[0] for r in rows if r.node}),
        tasks=len({r.key.conversation for r in rows}),
        repeats=1 + max(r.repeat for r in rows),
        groups=groups,
        methods={m: {g: _figures(m, g, rows, pairs, divergences, tasks, run_code) for g in names} for m in methods},
        hit_rates={g: next_next_hit_rate([t for t in traces if g in (OVERALL, t.group)]) for g in names},
        failures=[(r.method, r.bench, r.question, r.error) for r in rows if r.error is not None],
    )


def _figures(
    method: str,
    group: str,
    rows: Sequence[Row],
    pairs: Sequence[tuple[Row, Row]],
    divergences: Mapping[Key, Divergence],
    tasks: Mapping[TaskId, Task],
    run_code: bool,
) -> Figures:
    here = [r for r in rows if group in (OVERALL, r.group)]
    mine = [r for r in here if r.method == method]
    ratios = {base: speedup(mine, [r for r in here if r.method == base]) for base in BASELINES}
    mine_with_base = [(r, b) for r, b in pairs if r.method == method and group in (OVERALL, r.group)]
    return Figures(
        answers=len(mine),
        failed=sum(r.error is not None for r in mine),
        tokens=sum(len(r.output_ids) for r in mine),
        tokens_per_second=tokens_per_second(mine),
        speedups={base: ratio for base, ratio in ratios.items() if ratio is not None},
        mean_accepted_tokens=mean_accepted_tokens(mine),
        retrieval_success=retrieval_success(mine) if any(r.drafted for r in mine) else None,
        ttft=time_to_first_token(mine),
        itl=inter_token_latency(mine),
        step=step_latency(mine),
        memory_bytes=max((r.memory_bytes for r in mine), default=0),
        exactness=exactness(mine_with_base, divergences),
        accuracy=score(mine, tasks, run_code),
        sources=by_source(mine),
        depths=by_depth(mine),
        ranks=by_rank(mine),
        reaching=steps_reaching(mine),
        time_share=time_share(mine),
    )


def _order(method: str) -> tuple[int, str]:
    """Baselines first."""
    order = ("hf", "hf_pld", "vanilla", "pld", "rest", "logitspec", "adaptive")
    return (order.index(method) if method in order else len(order)), method
