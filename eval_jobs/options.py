"""Options that several commands share."""

from __future__ import annotations

import argparse
from typing import Any

from eval_jobs.benchmarks import BENCHMARKS, DATA_VARIABLE, OWN, first_turns


class _Names(argparse.Action):
    """Makes one list of names that have commas or spaces between them."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        names = [name.strip() for value in values for name in value.split(",") if name.strip()]
        if not names:
            parser.error(f"{option} names nothing")
        setattr(namespace, self.dest, names)


def add_bench_option(parser: argparse.ArgumentParser) -> None:
    """--bench, --data-dir."""
    parser.add_argument(
        "--bench",
        nargs="+",
        action=_Names,
        default=[OWN],
        metavar="BENCH",
        help=f"{', '.join((OWN, *BENCHMARKS))}, or .jsonl files, with commas or spaces between (default: {OWN})",
    )
    parser.add_argument(
        "--data-dir", metavar="DIR", help=f"where to look first for benchmarks' files; then in ${DATA_VARIABLE}"
    )


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """--bench, --data-dir, --limit, for commands that use first turns."""
    add_bench_option(parser)
    parser.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help="N prompts of each benchmark, evenly spaced; of all, first turns (default: all)",
    )


def chosen_prompts(args: argparse.Namespace) -> list[str]:
    """First turns of the prompts that ``add_prompt_options`` let the user name. Raises PromptFileError."""
    return [text for bench in args.bench for text in first_turns(bench, args.limit, args.data_dir)]


def add_length_option(parser: argparse.ArgumentParser) -> None:
    """--max-new-tokens."""
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
