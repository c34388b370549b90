"""The report's plots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval_jobs.metrics.summary import BASELINES, OVERALL, Summary
from eval_jobs.report.sections import Entry, all_groups, entries, heading, speedup_title

_SIZE = (8.0, 4.0)  # inches
_DEPTHS = 16


def plots(runs: Sequence[Summary]) -> dict[str, Figure]:
    """Figures by name; those with nothing to show are left out."""
    every = entries(runs)
    drawn = {f"speedup_{base}": _speedups(every, all_groups(runs), base) for base in BASELINES}
    drawn |= {"depth": _depths(every), "hits": _hits(runs), "time": _time(every)}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _axes(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend_below(axes: Axes) -> None:
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False)


def _color(entry: Entry, every: Sequence[Entry]) -> str:
    """A method's colour, the same in all plots."""
    return f"C{every.index(entry)}"


def _speedups(every: Sequence[Entry], groups: Sequence[str], base: str) -> Figure | None:
    shown = [e for e in every if base in e.overall.speedups and e.method != base]
    if not shown:
        return None
    figure, axes = _axes(speedup_title(base))
    names = [*groups, OVERALL]
    width = 0.8 / len(shown)
    for i, entry in enumerate(shown):
        ratios = [entry.by_group[g].speedups.get(base) if g in entry.by_group else None for g in names]
        places = np.arange(len(names)) + (i - (len(shown) - 1) / 2) * width
        heights = [r.median if r else 0.0 for r in ratios]
        errors = [[r.median - min(r.low, r.median) if r else 0.0 for r in ratios]]
        errors.append([max(r.high, r.median) - r.median if r else 0.0 for r in ratios])
        axes.bar(
            places,
            heights,
            width,
            yerr=errors,
            color=_color(entry, every),
            label=entry.label,
            error_kw={"elinewidth": 0.8},
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(np.arange(len(names)), [heading(n).replace(" ", "\n") for n in names], fontsize=8)
    axes.set_ylabel("× tokens/s")
    _legend_below(axes)
    return figure


def _depths(every: Sequence[Entry]) -> Figure | None:
    shown = [e for e in every if e.overall.reaching]
    if not shown:
        return None
    figure, axes = _axes("Decode steps that accept a draft of this depth")
    for entry in shown:
        shares = entry.overall.reaching[:_DEPTHS]
        axes.plot(
            range(1, len(shares) + 1),
            [100 * s for s in shares],
            color=_color(entry, every),
            marker="o",
            markersize=3,
            label=entry.label,
        )
    axes.set_xlabel("depth")
    axes.set_ylabel("% of steps")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return figure


def _hits(runs: Sequence[Summary]) -> Figure | None:
    lines = [(run, group, rates) for run in runs for group, rates in run.hit_rates.items() if rates]
    if not lines:
        return None
    figure, axes = _axes("Token after the next within the k best of the last logits")
    for run, group, rates in lines:
        name = heading(group) if len(runs) == 1 else f"{run.name}/{heading(group)}"
        style: dict[str, Any] = {"linewidth": 2.0, "color": "black"} if group == OVERALL else {"linewidth": 0.8}
        axes.plot(range(1, len(rates) + 1), [100 * r for r in rates], label=name, **style)
    axes.set_xlabel("k")
    axes.set_ylabel("% of tokens")
    axes.set_ylim(bottom=0)
    _legend_below(axes)
    return figure


def _time(every: Sequence[Entry]) -> Figure | None:
    shown = [e for e in every if e.overall.time_share]
    if not shown:
        return None
    figure, axes = _axes("Where the time goes")
    left = np.zeros(len(shown))
    for part in dict.fromkeys(part for e in shown for part in e.overall.time_share):
        shares = np.array([100 * e.overall.time_share.get(part, 0.0) for e in shown])
        axes.barh([e.label for e in shown], shares, left=left, label=part)
        left += shares
    axes.set_xlabel("% of the time in steps")
    axes.invert_yaxis()
    _legend_below(axes)
    return figure
