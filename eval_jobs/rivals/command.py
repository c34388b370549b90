"""``python -m eval_jobs systems``: other serving systems and ours on the same prompts, on this machine's CPU.

Each is installed from the package registry into an environment of its own (in the cache, kept) and answers the same
token ids greedily: one request at a time, then many at once, every time in a fresh process, so that nothing is known
from before. What cannot be installed or fails is told in its row; the others go on.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from cluster.cli.options import model_config
from cluster.models import EMBEDDED_NAME, ModelError, load_tokenizer, render_chat
from cluster.models.chat import end_of_turn_ids
from cluster.models.checkpoints import model_checkpoint
from cluster.models.resolve import resolve
from cluster.prompts import PromptFileError, evenly_spaced
from eval_jobs.benchmarks import Task, load_benchmark, pick_per_group
from eval_jobs.options import add_bench_option, add_length_option
from eval_jobs.rivals.catalogue import RIVALS
from eval_jobs.rivals.environments import EnvironmentFailure
from eval_jobs.rivals.running import Answers, RivalFailure, answer, interpreter

_WARM_UP = "Why is the sky blue in the daytime and red in the evening? Explain it in simple words."
_WARM_UP_TOKENS = 16


def add_parser(subcommands: Any) -> None:
    """Declare the command and its options."""
    parser = subcommands.add_parser("systems", help="other serving systems beside ours", description=__doc__)
    parser.add_argument("--model", default=EMBEDDED_NAME, help="directory, GGUF file, or the embedded default")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    add_bench_option(parser)
    parser.add_argument("--prompts", type=int, default=24, metavar="N", help="over all groups (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=24, metavar="B", help="requests at once (default: %(default)s)")
    add_length_option(parser)
    parser.add_argument("--systems", default=",".join(RIVALS), help="which (default: %(default)s)")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="most a system may take for one way")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.set_defaults(run=run, device="cpu")


def run(args: argparse.Namespace) -> None:
    """Run the comparison, print the table and, with --json, one object on the last line."""
    names = parse_names(args.systems)
    tasks = [task for name in args.bench for task in load_benchmark(name, args.data_dir)]
    request = make_request(args, pick_over_groups(tasks, args.prompts))
    pythons = {name: prepare(name) for name in names}  # before anything is timed
    rows = {name: run_rival(name, pythons[name], request, args.at_once, args.timeout_s) for name in names}
    figures = summarize(rows)
    print(format_table(figures, args.at_once))
    if args.json:
        setting = {"prompts": len(request["prompts"]), "max_new_tokens": args.max_new_tokens, "dtype": args.dtype}
        print(json.dumps(setting | {"at_once": args.at_once, "systems": figures}))


def parse_names(text: str) -> list[str]:
    """Systems of a comma-separated list. Raises PromptFileError for one that is unknown."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in RIVALS]
    if unknown or not names:
        raise PromptFileError(f"unknown system {', '.join(unknown) or '(none)'}; choose from {', '.join(RIVALS)}")
    return names


def pick_over_groups(tasks: list[Task], count: int) -> list[Task]:
    """``count`` tasks, as evenly over the groups as goes."""
    groups = len({(task.bench, task.group) for task in tasks})
    return evenly_spaced(pick_per_group(tasks, -(-count // groups)), count)


def make_request(args: argparse.Namespace, tasks: list[Task]) -> dict[str, Any]:
    """What every system is asked, but for how many at once and its own options."""
    checkpoint = model_checkpoint(resolve(model_config(args).model))
    tokenizer = load_tokenizer(checkpoint)
    ends = GenerationConfig.from_pretrained(checkpoint).eos_token_id
    stop_ids = end_of_turn_ids(tokenizer) | set(ends if isinstance(ends, list) else [ends])

    def tokens(text: str) -> list[int]:
        return list(render_chat(tokenizer, [{"role": "user", "content": text}]))

    return {
        "model": checkpoint,
        "dtype": args.dtype,
        "prompts": [tokens(task.turns[0]) for task in tasks],
        "max_new_tokens": args.max_new_tokens,
        "stop_ids": sorted(i for i in stop_ids if i is not None),
        "warm_up": tokens(_WARM_UP),
        "warm_up_tokens": _WARM_UP_TOKENS,
    }


def prepare(name: str) -> Path | str:
    """The interpreter that runs a system; the reason where it could not be installed."""
    try:
        return interpreter(RIVALS[name])
    except (EnvironmentFailure, ModelError) as error:
        return f"not installed: {error}"


def run_rival(
    name: str, python: Path | str, request: dict[str, Any], at_once: int, timeout_s: float
) -> dict[str, Answers | str]:
    """A system's answers ``alone`` and ``at_once``; the reason where there are none. Told on stderr as they come."""
    ways: dict[str, Answers | str] = {}
    for way, count in (("alone", 1), ("at_once", at_once)):
        ways[way] = (
            python if isinstance(python, str) else _answers(name, python, request | {"at_once": count}, timeout_s)
        )
        print(f"{name}, {count} at once: {_cells(_figures(ways[way], None))[0]}", file=sys.stderr, flush=True)
    return ways


def _answers(name: str, python: Path, request: dict[str, Any], timeout_s: float) -> Answers | str:
    try:
        return answer(RIVALS[name], python, request, timeout_s)
    except RivalFailure as error:
        return f"failed: {error}"


def summarize(rows: dict[str, dict[str, Answers | str]]) -> dict[str, dict[str, Any]]:
    """Figures by system and way; ratios and identical answers against ``hf`` of the same way."""
    base = rows.get("hf", {})
    return {name: {way: _figures(a, base.get(way)) for way, a in ways.items()} for name, ways in rows.items()}


def _figures(answers: Answers | str, base: Answers | str | None) -> dict[str, Any]:
    if isinstance(answers, str):
        return {"failure": answers}
    figures: dict[str, Any] = {
        "tokens": sum(map(len, answers.token_ids)),
        "seconds": round(answers.seconds, 3),
        "tokens_per_s": round(answers.tokens_per_s, 2),
    }
    if isinstance(base, Answers):
        figures["ratio_to_hf"] = round(answers.tokens_per_s / base.tokens_per_s, 3)
        pairs = zip(answers.token_ids, base.token_ids, strict=True)
        figures["identical_to_hf"] = sum(mine == theirs for mine, theirs in pairs)
    return figures


def format_table(figures: dict[str, dict[str, Any]], at_once: int) -> str:
    """The comparison for people, in Markdown."""
    lines = [
        f"| system | tokens/s, one at a time | × `hf` | = `hf` | tokens/s, {at_once} at once | × `hf` | = `hf` |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, ways in figures.items():
        cells = [cell for way in ("alone", "at_once") for cell in _cells(ways[way])]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(figures: dict[str, Any]) -> tuple[str, str, str]:
    if "failure" in figures:
        return figures["failure"].replace("|", "/"), "–", "–"
    ratio = f"{figures['ratio_to_hf']:.2f}" if "ratio_to_hf" in figures else "–"
    return f"{figures['tokens_per_s']:.1f}", ratio, str(figures.get("identical_to_hf", "–"))
