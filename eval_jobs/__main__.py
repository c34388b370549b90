"""Command line of the evaluation: compare methods, check outputs, time an endpoint, see a demonstration."""

from __future__ import annotations

import argparse
import sys

from cluster.cli.options import run_command
from eval_jobs import compare, demo, exactness, load, load_probe, priors
from eval_jobs.report import command as report
from eval_jobs.rivals import command as systems
from eval_jobs.simulation import command as simulate
from eval_jobs.sweep import command as sweep


def main(argv: list[str] | None = None) -> int:
    """Parse, run, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m eval_jobs", description=__doc__)
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (compare, demo, exactness, load, load_probe, sweep, report, simulate, systems, priors):
        command.add_parser(subcommands)
    args = parser.parse_args(argv)
    return run_command(args.run, args)


if __name__ == "__main__":
    sys.exit(main())
