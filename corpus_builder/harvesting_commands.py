"""The command that runs a model: harvest."""

from __future__ import annotations

import argparse
import time

from cluster.decoding.params import SamplingParams, Speculation
from cluster.models import EMBEDDED_NAME, ModelConfig
from corpus_builder.answering import AnswerSettings
from corpus_builder.harvest import Harvest, HarvestRequest, harvest
from corpus_builder.requests import Execution
from corpus_builder.showing import describe


def harvest_command(args: argparse.Namespace) -> int:
    """harvest: a model's own answers to corpus."""
    settings = AnswerSettings(
        model=ModelConfig(model=args.model or EMBEDDED_NAME, dtype=args.dtype, device=args.device),
        sampling=SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed),
        speculation=Speculation(method=args.method),
        batch=args.batch,
    )
    request = HarvestRequest(
        prompts=args.prompts, out=args.out, settings=settings, limit=args.limit, cpus=args.cpus, shards=args.shards
    )
    execution = Execution(parallelism=args.parallelism, memory_mb=args.memory, ray_address=args.ray_address)
    start = time.monotonic()
    made, manifest = harvest(request, execution)
    _report(made, time.monotonic() - start)
    print(describe(manifest))
    return 0


def _report(made: Harvest, seconds: float) -> None:
    print(f"prompts     {made.wanted:,}, of which {made.found:,} were done before")
    print(f"answered    {made.answered:,} with {made.tokens:,} tokens in {seconds:.0f} s")
    if made.failed:
        prompt, reason = next(iter(made.failed.items()))
        print(f"failed      {len(made.failed):,}, such as {prompt[:40]!r}: {reason}")
    if made.lost:
        print(f"lost        {made.lost:,} whose engines died; harvest again to try them anew")
