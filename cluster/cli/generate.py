"""``python -m cluster generate``: prompts in, one JSON row a prompt out."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO

from cluster.cli.options import add_corpus_options, add_method_options, add_model_options, model_config, open_corpus
from cluster.decoding.params import SamplingParams, Speculation
from cluster.engine import Engine, EngineConfig, Request, RequestOutput
from cluster.models import load_model, render_chat
from cluster.prompts import Prompt, check_text, read_prompts


def add_parser(subcommands: Any) -> None:
    """Declare the command and its options."""
    parser = subcommands.add_parser("generate", help="answer prompts", description=__doc__)
    add_model_options(parser)
    add_method_options(parser)
    add_corpus_options(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", metavar="FILE.jsonl", help="rows with 'turns' (the first is used) or 'prompt'")
    source.add_argument("--prompt", metavar="TEXT", help="one prompt")
    parser.add_argument("--limit", type=int, help="answer N rows, evenly spaced over the file")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="prompts run at once (default: %(default)s)")
    parser.add_argument("--out", metavar="OUT.jsonl", help="write rows here (default: print them)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Answer the prompts; rows are written as they finish, in the order of the prompts."""
    params = SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        stop=args.stop,
    )
    speculation = Speculation(method=args.method, capacity=args.capacity)
    config = EngineConfig(max_sequences=args.batch)
    check_text(args.prompt or "", "--prompt")
    prompts = read_prompts(args.prompts, args.limit) if args.prompts else [Prompt("0", "prompt", (args.prompt,))]
    # Opened before the model is loaded, to notice a wrong path; emptied after it, as a wrong model must cost no rows.
    with Path(args.out).open("a", encoding="utf-8") if args.out else nullcontext(sys.stdout) as out:
        _answer(args, prompts, params, speculation, config, out)


def _answer(
    args: argparse.Namespace,
    prompts: list[Prompt],
    params: SamplingParams,
    speculation: Speculation,
    config: EngineConfig,
    out: TextIO,
) -> None:
    loaded = load_model(model_config(args))
    engine = Engine(loaded, config, open_corpus(args, loaded))
    requests = []
    for prompt in prompts:
        text = prompt.turns[0]
        ids = (
            loaded.tokenizer.encode(text)
            if args.raw
            else render_chat(loaded.tokenizer, [{"role": "user", "content": text}])
        )
        requests.append(Request(ids, params, speculation))
    if args.out and Path(args.out).is_file():
        out.truncate(0)
    for at in range(0, len(requests), args.batch):
        outputs = engine.generate(requests[at : at + args.batch])
        for prompt, output in zip(prompts[at : at + args.batch], outputs, strict=True):
            print(json.dumps(row(prompt.id, output), ensure_ascii=False), file=out, flush=True)


def row(prompt_id: str, output: RequestOutput) -> dict[str, Any]:
    """What is written of one answer; times in seconds."""
    return {
        "id": prompt_id,
        "prompt_tokens": output.prompt_tokens,
        "token_ids": output.token_ids,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "decode_steps": output.stats.decode_steps,
        "mat": round(output.stats.mean_accepted_tokens, 4),
        "ttft_s": round(output.stats.ttft, 6),
        "decode_s": round(output.stats.decode_seconds, 6),
    }
