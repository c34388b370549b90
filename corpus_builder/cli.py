"""Running commands: what an error looks like, and the commands that need neither tokenizer nor Ray."""

from __future__ import annotations

import argparse
import importlib
import json
import sys

from pydantic import ValidationError

from cluster.retrieval import CorpusError, verify
from cluster.retrieval.storage import Location, read_manifest
from corpus_builder.showing import describe, summary


def run(args: argparse.Namespace) -> int:
    """Run the command `args.command`, named as module:function, and return its exit code.

    The module is loaded now: what only some commands need takes seconds to load. Errors that the user can mend
    end with one line and exit code 2.
    """
    module, _, function = args.command.partition(":")
    try:
        code: int = getattr(importlib.import_module(module), function)(args)
        return code
    except ValidationError as error:
        for problem in error.errors():
            field = ".".join(str(part) for part in problem["loc"]) or "options"
            print(f"error: {field}: {problem['msg']}", file=sys.stderr)
    except (CorpusError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        if "out" in args:
            print(f"interrupted; the same command goes on with what is in {args.out}", file=sys.stderr)
        return 130
    return 2


def inspect_command(args: argparse.Namespace) -> int:
    """inspect: what a corpus is."""
    manifest = read_manifest(Location.parse(args.corpus))
    print(json.dumps(summary(manifest), indent=1) if args.json else describe(manifest))
    return 0


def verify_command(args: argparse.Namespace) -> int:
    """verify: sizes and checksums of all files."""
    messages = verify(args.corpus)
    for message in messages:
        print(f"error: {message}", file=sys.stderr)
    if not messages:
        print("all files are as they were built")
    return 2 if messages else 0
