"""``python -m eval_jobs report``: tables, plots and a page of one run or several side by side."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any


def add_parser(subcommands: Any) -> None:
    """Declare the command and its options."""
    parser = subcommands.add_parser("report", help="tables, plots and a page of a sweep", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="directories that sweep wrote")
    parser.add_argument("--out", metavar="DIR", help="where to write (default: RUN/report of the first run)")
    parser.add_argument("--title", default="Speculative decoding: evaluation")
    parser.add_argument(
        "--run-code",
        action="store_true",
        help="run the programs that the model wrote, with limits on time and memory, to score HumanEval",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Write report.md, report.html, summary.json, the plots and Spec-Bench's answers; print the Markdown."""
    from eval_jobs.metrics.summary import summarize
    from eval_jobs.report.plots import plots
    from eval_jobs.report.rendering import to_html, to_markdown
    from eval_jobs.report.sections import sections
    from eval_jobs.report.spec_bench import export_answers
    from eval_jobs.run_directory import distinct_runs

    directories = distinct_runs(args.runs)
    summaries = [summarize(directory, args.run_code) for directory in directories]
    out = Path(args.out) if args.out else directories[0].path / "report"
    out.mkdir(parents=True, exist_ok=True)
    figures = plots(summaries)
    for name, figure in figures.items():
        figure.savefig(out / f"{name}.svg")
        figure.savefig(out / f"{name}.png")
    found = sections(summaries)
    markdown = to_markdown(args.title, found, {name: f"{name}.svg" for name in figures})
    (out / "report.md").write_text(markdown, encoding="utf-8")
    (out / "report.html").write_text(to_html(args.title, found, figures), encoding="utf-8")
    (out / "summary.json").write_text(json.dumps([asdict(s) for s in summaries], indent=1), encoding="utf-8")
    for directory in directories:
        export_answers(directory, out / "answers" / (directory.name if len(directories) > 1 else ""))
    print(markdown)
    print(f"written: {out}/report.html, report.md, summary.json, plots, answers")
