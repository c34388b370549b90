"""``python -m eval_jobs load``: send prompts to an OpenAI-compatible endpoint and time its streams.

With --concurrency, so many requests are under way at any moment; with --rate, they arrive at random (Poisson) at so
many a second, whatever the endpoint makes of them. Each level has prompts of its own: an endpoint may answer a prompt
faster that it has answered before.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.cli.progress import Progress
from cluster.prompts import PromptFileError
from eval_jobs.load_client import LoadClient, Outcome
from eval_jobs.load_summary import format_table, summarize
from eval_jobs.options import add_prompt_options, chosen_prompts

_LEAST, _MOST = 0.001, 100_000


def add_parser(subcommands: Any) -> None:
    """Declare the command and its options."""
    parser = subcommands.add_parser("load", help="time an endpoint under load", description=__doc__)
    parser.add_argument("--base-url", required=True, metavar="URL", help="such as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", required=True, help="what the endpoint calls it")
    add_prompt_options(parser)
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--concurrency", type=_numbers(int), default=[1, 4, 16], metavar="N,…", help="default: 1,4,16")
    level.add_argument("--rate", type=_numbers(float), metavar="R,…", help="requests a second")
    parser.add_argument(
        "--requests", type=_positive(int), metavar="N", help="at each level (default: its share of the prompts, once)"
    )
    parser.add_argument("--max-tokens", type=_positive(int), default=128, metavar="N")
    parser.add_argument("--timeout", type=_positive(float), default=300.0, metavar="S", help="of a request, seconds")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    parser.add_argument("--extra-body", type=_object, default={}, metavar="JSON", help="further fields of each request")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument(
        "--out", type=Path, metavar="RUN", help="directory for load.json and a row a request, load.jsonl"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run all levels, print the table and, with --json, one object on the last line.

    Raises:
        ConnectionError: the endpoint does not answer a first request as it should.
    """
    texts = chosen_prompts(args)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "load.jsonl").write_text("")
    levels = asyncio.run(_run_levels(args, texts))
    summaries = [{"concurrency": n, "rate": rate, **summarize(outcomes)} for n, rate, outcomes in levels]
    print(format_table(summaries))
    result = {
        "base_url": args.base_url,
        "model": args.model,
        "bench": ",".join(Path(path).stem for path in args.bench),
        "max_tokens": args.max_tokens,
        "extra_body": args.extra_body,
        "levels": summaries,
    }
    if args.out is not None:
        (args.out / "load.json").write_text(json.dumps(result, indent=2) + "\n")
    if args.json:
        print(json.dumps(result))


async def _run_levels(
    args: argparse.Namespace, texts: Sequence[str]
) -> list[tuple[int | None, float | None, list[Outcome]]]:
    """(concurrency, rate, outcomes) of each level."""
    fields = {"model": args.model, "max_tokens": args.max_tokens, "temperature": 0, **args.extra_body}
    values = args.rate or args.concurrency
    levels: list[tuple[int | None, float | None, list[Outcome]]] = []
    async with LoadClient(args.base_url, args.timeout, api_key(args.api_key_env), fields) as client:
        await _check(client)
        for i, value in enumerate(values):
            prompts = _share(texts, i, len(values), args.requests)
            if args.rate:
                levels.append((None, value, await at_rate(client, prompts, value)))
            else:
                levels.append((value, None, await at_concurrency(client, prompts, value)))
            if args.out is not None:
                _keep(args.out / "load.jsonl", *levels[-1])
    return levels


def _keep(file: Path, concurrency: int | None, rate: float | None, outcomes: Sequence[Outcome]) -> None:
    """Add a level's rows, so that what comes later cannot lose them."""
    with file.open("a") as rows:
        rows.writelines(json.dumps({"concurrency": concurrency, "rate": rate, **asdict(o)}) + "\n" for o in outcomes)


def _share(texts: Sequence[str], level: int, levels: int, requests: int | None) -> list[str]:
    """The prompts of a level: every ``levels``-th, again from the first where they do not suffice."""
    own = texts[level::levels] or texts
    if requests is not None and requests > len(own):
        print(f"{len(own)} prompts for {requests} requests: some are sent again", file=sys.stderr)
    return list(itertools.islice(itertools.cycle(own), requests or len(own)))


async def _check(client: LoadClient) -> None:
    """One small request, not counted: whether the endpoint works at all, and its warm-up."""
    outcome = await client.ask("Hello", max_tokens=8)
    if outcome.error is not None:
        raise ConnectionError(f"the endpoint failed a first request ({outcome.error}): {outcome.detail}")


async def at_concurrency(client: LoadClient, prompts: Sequence[str], concurrency: int) -> list[Outcome]:
    """Outcomes in the order of the prompts, ``concurrency`` requests under way until none is left to send."""
    outcomes: dict[int, Outcome] = {}
    waiting = iter(enumerate(prompts))
    start = time.perf_counter()

    async def worker(progress: Progress) -> None:
        for i, prompt in waiting:
            outcomes[i] = await _timed(client, prompt, start, progress)

    with Progress(len(prompts), f"{concurrency} at a time", "requests") as progress:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(prompts))):
                group.create_task(worker(progress))
    return [outcomes[i] for i in range(len(prompts))]


async def at_rate(client: LoadClient, prompts: Sequence[str], rate: float) -> list[Outcome]:
    """Outcomes in the order of the prompts, which are sent at random times, the same in every run."""
    chance = random.Random(0)
    start = due = time.perf_counter()
    tasks = []
    with Progress(len(prompts), f"{rate:g} a second", "requests") as progress:
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                tasks.append(group.create_task(_timed(client, prompt, start, progress)))
                due += chance.expovariate(rate)
    return [task.result() for task in tasks]


async def _timed(client: LoadClient, prompt: str, start: float, progress: Progress) -> Outcome:
    began = time.perf_counter() - start
    outcome = await client.ask(prompt)
    outcome.began = began
    progress.advance(failed=outcome.error is not None)
    return outcome


def api_key(variable: str | None) -> str | None:
    """The key in an environment variable, if one is named.

    Raises:
        PromptFileError: it holds none.
    """
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise PromptFileError(f"the environment variable {variable} holds no API key")
    return os.environ[variable]


def _positive(kind: type[int] | type[float]) -> Any:
    """An argparse type: a number above 0, within reason."""
    least = 1 if kind is int else _LEAST

    def parse(text: str) -> int | float:
        number = kind(text)
        if not least <= number <= _MOST:
            raise argparse.ArgumentTypeError(f"{text} is not between {least} and {_MOST}")
        return number

    parse.__name__ = kind.__name__
    return parse


def _numbers(kind: type[int] | type[float]) -> Any:
    """An argparse type: numbers above 0 with commas between."""
    one = _positive(kind)

    def parse(text: str) -> list[int | float]:
        return [one(part) for part in text.split(",")]

    parse.__name__ = f"list of {kind.__name__}s"
    return parse


def _object(text: str) -> dict[str, Any]:
    """An argparse type: a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value
