"""``python -m cluster bench-step``: how long a step takes, how near that is to what the hardware allows, and where the
rest goes.

Real sequences are decoded: random prompts of the context's length, trees of the width's size in every step. The floor
is the longer of reading weights, keys and values once at the measured memory bandwidth, and computing all tokens at
the measured rate of matrix products.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from typing import Any

import numpy as np

from cluster.cli.options import add_model_options, model_config
from cluster.decoding.params import SamplingParams, Speculation
from cluster.engine import Engine, EngineConfig, Request
from cluster.engine.floor import Hardware, StepFloor
from cluster.engine.stats import PARTS
from cluster.models import LoadedModel, load_model
from cluster.prompts import PromptFileError

_WARM_UP_STEPS = 3


def add_parser(subcommands: Any) -> None:
    """Declare the command and its options."""
    parser = subcommands.add_parser("bench-step", help="time steps against the hardware's floor", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--batch", default="1", metavar="B,…", help="sequences (default: %(default)s)")
    parser.add_argument("--width", default="1,2,4,8,16,32", metavar="W,…", help="nodes a tree (default: %(default)s)")
    parser.add_argument("--context", default="512", metavar="C,…", help="tokens before (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="steps timed of each kind (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Time every combination and print a table; with --json one object on the last line.

    Raises:
        PromptFileError: an option is no list of numbers.
    """
    shapes = list(itertools.product(*(_numbers(n, getattr(args, n)) for n in ("batch", "width", "context"))))
    if args.steps < 1:
        raise PromptFileError(f"--steps must be at least 1, not {args.steps}")
    loaded = load_model(model_config(args))
    hardware = Hardware.measure(loaded.device, loaded.dtype)
    floor = StepFloor.of(loaded, Engine(loaded, EngineConfig(optimize=False)).kv_bytes)
    print(f"memory {hardware.bandwidth / 1e9:.1f} GB/s, matrix products {hardware.matrix_rate / 1e9:.0f} Gop/s")
    print(f"{'batch':>5} {'width':>5} {'context':>7} {'step ms':>8} {'floor ms':>8} {'ratio':>6}   " + " ".join(PARTS))
    rows = []
    for batch, width, context in shapes:
        rows.append(_measure(loaded, batch, width, context, args.steps))
        rows[-1]["floor_ms"] = 1e3 * floor.seconds(hardware, batch * width, batch * context)
        print(_line(rows[-1]), flush=True)
    if args.json:
        print(json.dumps({"bandwidth": hardware.bandwidth, "matrix_rate": hardware.matrix_rate, "steps": rows}))


def _measure(loaded: LoadedModel, batch: int, width: int, context: int, steps: int) -> dict[str, Any]:
    # A tree that is all draft: LogitSpec fills every tree with guesses, of which each step may accept some.
    speculation = Speculation(method="logitspec" if width > 1 else "vanilla", capacity=width)
    new = (steps + _WARM_UP_STEPS + 1) * width
    engine = Engine(loaded, EngineConfig(max_sequences=batch, prefix_reuse=False))
    random = np.random.default_rng(0)
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    for _ in range(batch):
        prompt = random.integers(0, loaded.model.config.get_text_config().vocab_size, context)
        engine.add(Request(prompt.tolist(), params, speculation))
    emitted: set[str] = set()
    while len(emitted) < batch:
        emitted |= {d.request_id for d in engine.step() if d.token_ids}
    for _ in range(_WARM_UP_STEPS):
        engine.step()
    times, parts, computed = [], [], []
    for _ in range(steps):
        before, rows = engine.stats.stopwatch.seconds, engine.stats.computed_tokens
        engine.step()
        parts.append({part: s - before[part] for part, s in engine.stats.stopwatch.seconds.items()})
        times.append(sum(parts[-1].values()))
        computed.append(engine.stats.computed_tokens - rows)
    return {
        "batch": batch,
        "width": width,
        "context": context,
        "tokens": statistics.median(computed),
        "step_ms": 1e3 * statistics.median(times),
        "share": {part: sum(p[part] for p in parts) / sum(times) for part in PARTS},
    }


def _line(row: dict[str, Any]) -> str:
    shares = " ".join(f"{100 * share:.1f}%" for share in row["share"].values())
    return (
        f"{row['batch']:>5} {row['width']:>5} {row['context']:>7} {row['step_ms']:>8.2f} {row['floor_ms']:>8.2f} "
        f"{row['step_ms'] / row['floor_ms']:>6.2f}   {shares}"
    )


def _numbers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise PromptFileError(f"--{name} {text}: expected numbers from 1 on, such as 1,8,16")
    return numbers
