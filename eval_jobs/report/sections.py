"""What a report says, as tables of text; how they look is another matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from eval_jobs.metrics.exactness import NEAR_TIE
from eval_jobs.metrics.speed import Speedup
from eval_jobs.metrics.summary import BASELINES, OVERALL, Figures, Summary

_HEADINGS = {
    "mt_bench": "Multi-turn Conversation",
    "translation": "Translation",
    "summarization": "Summarization",
    "qa": "Question Answering",
    "math_reasoning": "Mathematical Reasoning",
    "rag": "Retrieval-aug. Generation",
    OVERALL: "Overall",
}
_SHOWN_DEPTHS = 10
_SHOWN_RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 60)
_RANK_RANGES = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 64))
_SHOWN_FAILURES = 50


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, a table, and what to know about it; ``plot`` names the figure that goes with it."""

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""
    plot: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A method of a run, under the name it has in the report."""

    label: str
    run: Summary
    method: str
    by_group: dict[str, Figures] = field(repr=False)

    @property
    def overall(self) -> Figures:
        return self.by_group[OVERALL]


def entries(runs: Sequence[Summary]) -> list[Entry]:
    """All methods of all runs; their names say the run where there are several."""
    return [
        Entry(method if len(runs) == 1 else f"{run.name}/{method}", run, method, figures)
        for run in runs
        for method, figures in run.methods.items()
    ]


def all_groups(runs: Sequence[Summary]) -> list[str]:
    """Groups of all runs, each once."""
    return list(dict.fromkeys(g for run in runs for g in run.groups))


def heading(group: str) -> str:
    """A group's name in a table."""
    return _HEADINGS.get(group, group)


def speedup_title(base: str) -> str:
    """What a table or plot of speedups over this baseline is called."""
    return "Speedup over " + ("Hugging Face generate" if base == "hf" else "vanilla steps of the same engine")


def sections(runs: Sequence[Summary]) -> list[Section]:
    """The whole report."""
    every = entries(runs)
    groups = all_groups(runs)
    found = [_runs(runs)]
    found += [s for base in BASELINES if (s := _speedups(every, groups, base)) is not None]
    found += [_methods(every), _by_group(every, groups, "Tokens a second", lambda f: _number(f.tokens_per_second, 1))]
    found.append(_by_group(every, groups, "Mean accepted tokens", lambda f: _number(f.mean_accepted_tokens)))
    found += [_latency(every), _exactness(every)]
    found += _accuracy(every, groups)
    found += [_sources(every), _depths(every), _ranks(every), _hit_rates(runs), _time(every)]
    found += _failures(runs)
    return [s for s in found if s.rows]


def _runs(runs: Sequence[Summary]) -> Section:
    rows = []
    for run in runs:
        s = run.settings
        capacity = "method's own" if s.get("capacity") is None else str(s["capacity"])
        rows.append(
            [
                run.name,
                str(s.get("model")).rpartition("/")[2],
                run.dtype,
                ", ".join(run.devices),
                str(run.machines),
                f"{run.tasks} × {run.repeats}",
                f"{s.get('temperature'):g}",
                str(s.get("max_new_tokens")),
                capacity,
                str(s.get("concurrency")),
                "yes" if s.get("corpus") else "no",
            ]
        )
    header = "run,model,dtype,device,machines,tasks × repeats,temperature,new tokens,capacity,concurrency,corpus"
    return Section("Runs", header.split(","), rows)


def _speedups(every: Sequence[Entry], groups: Sequence[str], base: str) -> Section | None:
    """The table of the Spec-Bench leaderboard."""
    rows = []
    for entry in every:
        if base not in entry.overall.speedups or entry.method == base:
            continue
        ratios = [entry.by_group[g].speedups.get(base) if g in entry.by_group else None for g in groups]
        whole = entry.overall.speedups[base]
        rows.append(
            [
                entry.label,
                *[_ratio(r) for r in ratios],
                _number(entry.overall.mean_accepted_tokens),
                _ratio(whole),
                f"{whole.lowest:.2f}–{whole.highest:.2f}" if entry.run.repeats > 1 else "–",
                f"{whole.low:.2f}–{whole.high:.2f}",
            ]
        )
    if not rows:
        return None
    header = [
        "method",
        *[heading(g) for g in groups],
        "#Mean Accepted Tokens",
        "Overall",
        "range of repeats",
        "95% interval",
    ]
    note = (
        "Mean tokens a second over questions, prefill included, as a multiple of the baseline's; median of the "
        "repeats. The interval is that of the overall figure when questions are drawn anew (bootstrap, in pairs); in "
        "the plot every bar has its own."
    )
    return Section(speedup_title(base), header, rows, note, plot=f"speedup_{base}")


def _methods(every: Sequence[Entry]) -> Section:
    rows = [
        [
            e.label,
            str(e.overall.answers),
            str(e.overall.failed),
            str(e.overall.tokens),
            _number(e.overall.tokens_per_second, 1),
            _number(e.overall.mean_accepted_tokens),
            _percent(e.overall.retrieval_success),
            f"{e.overall.memory_bytes / 2**20:.0f}",
        ]
        for e in every
    ]
    header = ["method", "answers", "failed", "tokens", "tokens/s", "MAT", "retrieval success", "peak memory, MiB"]
    note = (
        "Retrieval success: decode steps in which a query found a continuation. Memory: of the device during an "
        "answer; on a CPU of the whole process so far."
    )
    return Section("Methods", header, rows, note)


def _by_group(every: Sequence[Entry], groups: Sequence[str], title: str, cell: Callable[[Figures], str]) -> Section:
    names = [*groups, OVERALL]
    rows = [[e.label, *[cell(e.by_group[g]) if g in e.by_group else "–" for g in names]] for e in every]
    return Section(title, ["method", *[heading(g) for g in names]], rows)


def _latency(every: Sequence[Entry]) -> Section:
    header = ["method", *[f"{what} {p}" for what in ("TTFT", "ITL", "step") for p in ("p50", "p90", "p99")]]
    rows = []
    for e in every:
        values = (e.overall.ttft, e.overall.itl, e.overall.step)
        rows.append([e.label, *[f"{1000 * v[p]:.1f}" if v else "–" for v in values for p in ("p50", "p90", "p99")]])
    note = (
        "TTFT: time to the first token, prefill included; ITL: time from token to token; step: of decode steps. "
        "Tokens of one step come together: the first has the step's latency, the others none."
    )
    return Section("Latency, ms", header, rows, note)


def _exactness(every: Sequence[Entry]) -> Section:
    rows = []
    for e in every:
        x = e.overall.exactness
        if x is None:
            continue
        counts = [x.compared, x.identical, x.near_ties, x.wrong, x.unknown]
        share = _percent(x.identical / x.compared)
        rows.append([e.label, share, *[str(c) for c in counts], f"{x.worst_gap:.4g}"])
    header = ["method", "share identical", "compared", "identical", "near-tie", "wrong", "not looked at", "worst gap"]
    limits = ", ".join(f"{gap:g} in {dtype}" for dtype, gap in NEAR_TIE.items())
    note = (
        "Answers against vanilla's to the same prompt, in every repeat. Near-tie: they part where the two candidates' "
        f"logits are within rounding ({limits}) of each other."
    )
    return Section("Exactness against vanilla", header, rows, note)


def _accuracy(every: Sequence[Entry], groups: Sequence[str]) -> list[Section]:
    scored = [g for g in groups if any(g in e.by_group and e.by_group[g].accuracy for e in every)]
    if not scored:
        return []
    rows = []
    for e in every:
        found = [e.by_group[g].accuracy if g in e.by_group else None for g in scored]
        rows.append([e.label, *["–" if a is None else f"{a[0]} of {a[1]}" for a in found]])
    note = "Answers that are right in the first repeat: final answers that match, programs that pass their tests."
    return [Section("Task accuracy", ["method", *[heading(g) for g in scored]], rows, note)]


def _sources(every: Sequence[Entry]) -> Section:
    rows = [
        [e.label, source, str(drafted), str(accepted), _percent(accepted / drafted)]
        for e in every
        for source, (accepted, drafted) in e.overall.sources.items()
    ]
    return Section("Acceptance by source", ["method", "source", "drafted", "accepted", "rate"], rows)


def _depths(every: Sequence[Entry]) -> Section:
    drafting = [e for e in every if e.overall.reaching]
    rows = []
    for e in drafting:
        cells = [_percent(share) for share in e.overall.reaching[:_SHOWN_DEPTHS]]
        rows.append([e.label, *cells, *["0.0%"] * (_SHOWN_DEPTHS - len(cells))])
    note = "Share of decode steps that accept a draft of this depth; over all depths they add up to MAT - 1."
    header = ["method", *[f"depth {d}" for d in range(1, _SHOWN_DEPTHS + 1)]]
    return Section("Acceptance by depth", header, rows, note, plot="depth")


def _ranks(every: Sequence[Entry]) -> Section:
    rows = []
    for e in every:
        ranks = e.overall.ranks
        if ranks:
            within = [ranks[first - 1 : last] for first, last in _RANK_RANGES]
            rows.append([e.label, *[_share(sum(a for a, _ in r), sum(d for _, d in r)) for r in within]])
    note = (
        "Of the next-next guesses of these ranks that were drafted below the root, by whichever source: how many came "
        "true, of how many."
    )
    names = [f"rank {first}" if first == last else f"ranks {first}–{last}" for first, last in _RANK_RANGES]
    return Section("Acceptance by rank of the guess", ["method", *names], rows, note)


def _hit_rates(runs: Sequence[Summary]) -> Section:
    rows = []
    for run in runs:
        for group, rates in run.hit_rates.items():
            if rates:
                name = heading(group) if len(runs) == 1 else f"{run.name}/{heading(group)}"
                rows.append([name, *[_percent(rates[k - 1]) for k in _SHOWN_RANKS]])
    note = "How often the token after the next is among the k best of the last logits, over all answer tokens."
    return Section("Next-next hit rate", ["group", *[f"k = {k}" for k in _SHOWN_RANKS]], rows, note, plot="hits")


def _time(every: Sequence[Entry]) -> Section:
    timed = [e for e in every if e.overall.time_share]
    parts = list(dict.fromkeys(part for e in timed for part in e.overall.time_share))
    rows = [[e.label, *[_percent(e.overall.time_share.get(p, 0.0)) for p in parts]] for e in timed]
    note = "Of the time in the engine's steps, those of the prefill among them."
    return Section("Where the time goes", ["method", *parts], rows, note, plot="time")


def _failures(runs: Sequence[Summary]) -> list[Section]:
    rows = [list(failure) for run in runs for failure in run.failures]
    if not rows:
        return []
    note = "" if len(rows) <= _SHOWN_FAILURES else f"The first {_SHOWN_FAILURES} of {len(rows)}."
    return [Section("Failures", ["method", "benchmark", "question", "error"], rows[:_SHOWN_FAILURES], note)]


def _ratio(value: Speedup | None) -> str:
    return "–" if value is None else f"{value.median:.2f}×"


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _share(part: int, whole: int) -> str:
    return f"{_percent(part / whole)} of {whole}" if whole else "–"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"
