"""Options that several commands share."""

from __future__ import annotations

import argparse


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """--bench, --limit."""
    parser.add_argument(
        "--bench",
        required=True,
        nargs="+",
        metavar="BENCH",
        help="files, or names as for sweep; first turns are used",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="N prompts of each file, evenly spaced (default: all)")


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """--bench, --limit, --max-new-tokens."""
    add_bench_options(parser)
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
