"""Command line of reference corpora: build, harvest, inspect, verify, query, append, bench, serve."""

from __future__ import annotations

import argparse
import sys
from typing import get_args

from cluster.decoding.params import METHODS, Speculation
from cluster.retrieval import BuildParameters
from corpus_builder import cli
from corpus_builder.requests import Execution, Kind

_DEFAULTS = BuildParameters()


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m corpus_builder", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_build(commands.add_parser("build", help="build a corpus from text"))
    _add_harvest(commands.add_parser("harvest", help="build a corpus from a model's own answers"))
    _add_append(commands.add_parser("append", help="add text to a corpus"))
    _add_inspect(commands.add_parser("inspect", help="show what a corpus is"))
    _add_verify(commands.add_parser("verify", help="check all files of a corpus"))
    _add_query(commands.add_parser("query", help="show what follows a text"))
    _add_bench(commands.add_parser("bench", help="measure lookups"))
    _add_serve(commands.add_parser("serve", help="start a corpus' actors on a Ray cluster"))
    return cli.run(parser.parse_args(arguments))


def _add_build(parser: argparse.ArgumentParser) -> None:
    _add_input(parser)
    parser.add_argument("--out", required=True, help="directory or URI for the corpus")
    parser.add_argument("--tokenizer", help="model whose tokenizer to use (default: that of the embedded model)")
    parser.add_argument("--shards", type=int, help="number of shards (default: as few as --memory allows)")
    parser.add_argument("--sizes", type=_numbers, default=_DEFAULTS.sizes, help="n-gram sizes (default: 1,2,3,4)")
    parser.add_argument(
        "--depth", type=int, default=_DEFAULTS.depth, help="longest continuation (default: %(default)s)"
    )
    parser.add_argument(
        "--max-nodes",
        type=int,
        default=_DEFAULTS.max_nodes,
        help="nodes of a continuation trie (default: %(default)s)",
    )
    parser.add_argument("--min-count", type=int, default=1, help="drop what is seen fewer times (default: %(default)s)")
    parser.add_argument("--max-bytes", type=_bytes, help="size budget of all shards, as in 500M or 2G")
    parser.add_argument(
        "--no-keep-tokens",
        dest="keep_tokens",
        action="store_false",
        help="do not keep the documents' token ids, without which nothing can be appended",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a corpus that is there")
    _add_execution(parser)
    parser.set_defaults(command="corpus_builder.building_commands:build_command")


def _add_harvest(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", required=True, metavar="FILE.jsonl", help="rows with 'turns' or 'prompt'")
    parser.add_argument("--out", required=True, metavar="DIR", help="local directory for the answers and the corpus")
    parser.add_argument("--model", help="the model that answers (default: the embedded model)")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="auto", help="cpu, cuda, … (default: a GPU if there is one)")
    parser.add_argument(
        "--method", default=Speculation().method, choices=METHODS, help="how to draft (default: %(default)s)"
    )
    parser.add_argument("--limit", type=int, help="answer N prompts, evenly spaced over the file")
    parser.add_argument(
        "--max-new-tokens", type=int, default=256, metavar="N", help="of an answer (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="(default: greedy)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--batch", type=int, default=16, help="prompts an engine answers at once (default: %(default)s)"
    )
    parser.add_argument("--cpus", type=int, help="CPUs of each engine, if there are no GPUs (default: those of a node)")
    parser.add_argument("--shards", type=int, help="number of shards (default: as few as --memory allows)")
    _add_execution(parser)
    parser.set_defaults(command="corpus_builder.harvesting_commands:harvest_command")


def _add_append(parser: argparse.ArgumentParser) -> None:
    _add_corpus(parser)
    _add_input(parser)
    _add_execution(parser)
    parser.set_defaults(command="corpus_builder.building_commands:append_command")


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    _add_corpus(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command="corpus_builder.cli:inspect_command")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    _add_corpus(parser)
    parser.set_defaults(command="corpus_builder.cli:verify_command")


def _add_query(parser: argparse.ArgumentParser) -> None:
    _add_corpus(parser)
    parser.add_argument("text", help="the text whose continuations to show")
    parser.add_argument("--tokenizer", help="model whose tokenizer to use (default: the one it was built with)")
    parser.add_argument("--max-nodes", type=_positive, default=32, help="most nodes to show (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command="corpus_builder.building_commands:query_command")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("corpus", nargs="?", help="directory or URI of a corpus")
    parser.add_argument("--keys", type=_positive, default=256, help="queries in a lookup (default: %(default)s)")
    parser.add_argument("--max-nodes", type=_positive, default=8, help="most nodes for a query (default: %(default)s)")
    parser.add_argument("--actors", action="store_true", help="also measure through actors, one a shard")
    parser.add_argument(
        "--grow",
        type=_millions,
        help="also measure synthetic corpora of so many million n-grams, as in 1,30",
    )
    _add_address(parser)
    parser.set_defaults(command="corpus_builder.serving_commands:bench_command")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    _add_corpus(parser)
    parser.add_argument("--replicas", type=_positive, default=1, help="actors for each shard (default: %(default)s)")
    parser.add_argument("--stop", action="store_true", help="end the corpus' actors instead")
    parser.add_argument(
        "--ray-address",
        help="Ray cluster to use (default: $RAY_ADDRESS, else the one that runs on this machine, else a new one)",
    )
    parser.set_defaults(command="corpus_builder.serving_commands:serve_command")


def _add_corpus(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("corpus", help="directory or URI of a corpus")


def _add_input(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PATH", help="files, directories or URIs, read in this order"
    )
    parser.add_argument(
        "--text-fields", type=_names, help="fields that hold text, as in prompt,completion (default: by name)"
    )
    parser.add_argument("--format", choices=get_args(Kind), help="kind of all files (default: by name)")


def _add_execution(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parallelism", type=int, help="worker processes (default: one for each core)")
    parser.add_argument(
        "--memory",
        type=int,
        default=Execution().memory_mb,
        metavar="MB",
        help="bound for each worker (default: %(default)s)",
    )
    _add_address(parser)


def _add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ray-address", help="Ray cluster to use (default: $RAY_ADDRESS, else this machine)")


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 0 < value < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return value


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 1,2,3,4") from None


def _millions(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value <= 200 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of millions, up to 200, such as 1,30")
    return values


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise argparse.ArgumentTypeError("no field is named; write them as in prompt,completion")
    return names


def _bytes(text: str) -> int:
    units = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    unit = units.get(text[-1:].upper(), 1)
    try:
        return int(float(text[:-1] if unit > 1 else text) * unit)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500M or 2G") from None


if __name__ == "__main__":
    sys.exit(main())
