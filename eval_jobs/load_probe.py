"""``python -m eval_jobs probe``: what a client feels at an endpoint of ours, in three small experiments.

A long prompt among running streams; a conversation's second turn; an edit of a file that the request predicts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from importlib import resources
from typing import Any

from eval_jobs.load import api_key
from eval_jobs.load_client import LoadClient, Outcome
from eval_jobs.load_summary import percentiles

_STREAMS = 4
_STREAM_TOKENS = 160
_FIRST_S = 3.0  # of the streams alone, before the long prompt comes
_LONG_WORDS = 2050
_HISTORY_WORDS = 1500
_EDIT_TOKENS = 150
_SHORT = {"max_tokens": 8, "min_tokens": 8}  # an answer that is there whatever the model would say
_WORDS = ["river", "stone", "window", "market", "garden", "letter", "engine", "harbour", "winter", "candle", "silver"]


def add_parser(subcommands: Any) -> None:
    """Declare the command and its options."""
    parser = subcommands.add_parser("probe", help="latencies that clients feel", description=__doc__)
    parser.add_argument("--base-url", required=True, metavar="URL", help="such as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", required=True, help="what the endpoint calls it")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="of a request, seconds")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the experiments; each prints one JSON object.

    Raises:
        ConnectionError: a request failed.
    """
    asyncio.run(_probe(args))


async def _probe(args: argparse.Namespace) -> None:
    fields = {"model": args.model, "temperature": 0}
    async with LoadClient(args.base_url, args.timeout, api_key(args.api_key_env), fields) as client:
        for name, experiment in (("stall", stall), ("second turn", second_turn), ("prediction", prediction)):
            print(json.dumps({name: await experiment(client)}), flush=True)


async def stall(client: LoadClient) -> dict[str, Any]:
    """ITL of running streams before a fresh long prompt comes and while it is computed."""
    fields = {"ignore_eos": True, "max_tokens": _STREAM_TOKENS}
    start = time.perf_counter()
    streams = [
        asyncio.create_task(client.ask(f"Tell a long story about {_WORDS[i]}.", **fields)) for i in range(_STREAMS)
    ]
    await asyncio.sleep(_FIRST_S)
    sent = time.perf_counter() - start
    long = _checked(await client.ask(_text(_LONG_WORDS), **_SHORT))
    answered = sent + _first_token(long)
    normal, during = [], []
    for outcome in [_checked(await stream) for stream in streams]:
        at = outcome.ttft or 0.0
        for gap in outcome.gaps:
            if at >= sent and at < answered:
                during.append(gap)
            elif at + gap < sent:
                normal.append(gap)
            at += gap
    before, beside = percentiles(normal), percentiles(during)
    ratio = round(beside["p95"] / before["p95"], 2) if before and beside else None
    return {"prompt_tokens": long.prompt_tokens, "itl_s": before, "itl_beside_s": beside, "p95_ratio": ratio}


async def second_turn(client: LoadClient) -> dict[str, Any]:
    """TTFT of a conversation with a long history, cold and as its second turn."""
    history = [{"role": "user", "content": _text(_HISTORY_WORDS)}]
    cold = _checked(await client.ask("", messages=history, **_SHORT))
    turns = [{"role": "assistant", "content": cold.text}, {"role": "user", "content": "Go on."}]
    second = _checked(await client.ask("", messages=history + turns, **_SHORT))
    first, again = _first_token(cold), _first_token(second)
    return {
        "prompt_tokens": cold.prompt_tokens,
        "cold_ttft_s": round(first, 4),
        "second_ttft_s": round(again, 4),
        "ratio": round(first / again, 2),
    }


async def prediction(client: LoadClient) -> dict[str, Any]:
    """Tokens a second of writing a file of 80 lines anew: `logitspec`, against the file as the request's prediction."""
    row = json.loads((resources.files("eval_jobs") / "data" / "demo_edit.jsonl").read_text())
    begun = {"role": "assistant", "content": "```python\n" + row["prediction"][: row["prediction"].index("\n")]}
    messages = [{"role": "user", "content": row["prompt"]}, begun]
    fields = {"messages": messages, "continue_final_message": True, "max_tokens": _EDIT_TOKENS}
    predicted = {"prediction": {"type": "content", "content": row["prediction"]}}
    for _ in range(2):  # the first time brings the prompt into the cache, and is not counted
        without = _checked(await client.ask("", **fields, speculation={"method": "logitspec"}))
        with_it = _checked(await client.ask("", **fields, **predicted))
    rates = [outcome.tokens / outcome.seconds for outcome in (without, with_it)]
    return {
        "tokens": without.tokens,
        "same_text": without.text == with_it.text,
        "tokens_per_s": round(rates[0], 2),
        "predicted_tokens_per_s": round(rates[1], 2),
        "ratio": round(rates[1] / rates[0], 2),
    }


def _text(words: int) -> str:
    """Text that no cache knows."""
    chance = random.Random()
    return "Summarize: " + " ".join(chance.choice(_WORDS) for _ in range(words))


def _first_token(outcome: Outcome) -> float:
    if outcome.ttft is None:
        raise ConnectionError("the endpoint gave an answer without text")
    return outcome.ttft


def _checked(outcome: Outcome) -> Outcome:
    if outcome.error is not None:
        raise ConnectionError(f"the endpoint failed ({outcome.error}): {outcome.detail}")
    return outcome
