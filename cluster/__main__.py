"""Command line of the engine: ``python -m cluster generate`` answers prompts, ``bench-step`` times steps."""

from __future__ import annotations

import argparse
import sys

from cluster.cli import bench_step, generate
from cluster.cli.options import run_command


def main(argv: list[str] | None = None) -> int:
    """Parse, run, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cluster", description=__doc__)
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (generate, bench_step):
        command.add_parser(subcommands)
    args = parser.parse_args(argv)
    return run_command(args.run, args)


if __name__ == "__main__":
    sys.exit(main())
