"""``python -m eval_jobs compare``: methods side by side in one process, interleaved prompt by prompt."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from cluster.cli.options import add_capacity_option, add_corpus_options, add_model_options, model_config, open_corpus
from cluster.cli.progress import Progress
from cluster.decoding.adaptive import LEAVABLE, Adaptive
from cluster.decoding.params import METHODS, SamplingParams
from cluster.engine import Engine, EngineConfig
from cluster.models import LoadedModel, load_model, render_chat
from cluster.prompts import PromptFileError
from cluster.retrieval import CorpusLookup
from eval_jobs.comparison import GapMeter, summarize
from eval_jobs.options import add_length_option, add_prompt_options, chosen_prompts
from eval_jobs.systems import HF_SYSTEMS, SYSTEMS, EngineSystem, Generation, HuggingFaceSystem, System

_HF_LOOKUP_TOKENS = 10
_WARM_UP_TOKENS = 8
_LEGEND = (
    "tok/s: all tokens by all time, prefill included; ×hf, ×vanilla: median of the prompts' own ratios of it",
    "MAT: tokens a decode step; =hf, =vanilla: prompts with the same tokens; gap: how far two candidates' logits lay",
    "apart where the tokens parted, at worst (vanilla's from hf's, others' from vanilla's)",
)


def add_parser(subcommands: Any) -> None:
    """Declare the command and its options."""
    parser = subcommands.add_parser("compare", help="methods side by side", description=__doc__)
    add_model_options(parser)
    add_capacity_option(parser)
    add_corpus_options(parser)
    add_prompt_options(parser)
    add_length_option(parser)
    parser.add_argument("--methods", default="hf,vanilla,pld,logitspec,adaptive", help=f"of {','.join(SYSTEMS)}")
    parser.add_argument(
        "--ablate", action="store_true", help="also run adaptive without each of its sources, to see what it brings"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the comparison, print the table and, with --json, one object on the last line."""
    names = parse_systems(args.methods)
    params = SamplingParams(max_new_tokens=args.max_new_tokens)
    texts = chosen_prompts(args)
    loaded = load_model(model_config(args))
    prompts = [render_chat(loaded.tokenizer, [{"role": "user", "content": text}]) for text in texts]
    reference = load_model(model_config(args)) if any(n in HF_SYSTEMS for n in names) else loaded
    corpus = open_corpus(args, loaded)
    systems = make_systems(names, loaded, reference, args.capacity, corpus)
    if args.ablate:
        systems |= make_ablations(loaded, args.capacity, corpus)
    runs = run_interleaved(systems, prompts, params)
    methods = summarize(runs, logit_gap(reference, prompts))
    print(format_table(methods))
    print(format_sources(methods))
    if args.json:
        bench = ",".join(Path(path).stem for path in args.bench)
        dtype = str(loaded.dtype).removeprefix("torch.")
        print(json.dumps({"bench": bench, "prompts": len(prompts), "dtype": dtype, "methods": methods}))


def parse_systems(text: str) -> list[str]:
    """Names of a comma-separated list.

    Raises:
        PromptFileError: a name is unknown.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown or not names:
        raise PromptFileError(f"unknown method {', '.join(unknown) or '(none)'}; choose from {', '.join(SYSTEMS)}")
    return names


def make_systems(
    names: Iterable[str],
    loaded: LoadedModel,
    reference: LoadedModel,
    capacity: int | None,
    corpus: CorpusLookup | None = None,
) -> dict[str, System]:
    """Systems by name. Ours share one engine; Hugging Face gets a model object that nobody optimises."""
    # Prefix reuse off: a method must not profit from the prompt that the method before it computed.
    engine = Engine(loaded, EngineConfig(max_sequences=1, prefix_reuse=False), corpus)
    systems: dict[str, System] = {}
    for name in names:
        if name in HF_SYSTEMS:
            systems[name] = HuggingFaceSystem(reference, _HF_LOOKUP_TOKENS if name == "hf_pld" else None)
        else:
            systems[name] = EngineSystem(engine, next(m for m in METHODS if m == name), capacity)
    return systems


def make_ablations(loaded: LoadedModel, capacity: int | None, corpus: CorpusLookup | None) -> dict[str, System]:
    """Adaptive drafting without one source each, by names such as ``adaptive-context``."""
    systems: dict[str, System] = {}
    vocabulary = loaded.model.config.get_text_config().vocab_size
    for source in LEAVABLE if corpus is not None else [s for s in LEAVABLE if s != "corpus"]:
        drafter = Adaptive(vocabulary, corpus, without=source)
        engine = Engine(loaded, EngineConfig(max_sequences=1, prefix_reuse=False), corpus, {"adaptive": drafter})
        systems[f"adaptive-{source}"] = EngineSystem(engine, "adaptive", capacity)
    return systems


def run_interleaved(
    systems: dict[str, System], prompts: Sequence[Sequence[int]], params: SamplingParams
) -> dict[str, list[Generation]]:
    """Every prompt through every system before the next prompt, so that machine noise hits all alike.

    The order of the systems turns by one with each prompt. A short warm-up is not counted.
    """
    warm_up = params.model_copy(update={"max_new_tokens": _WARM_UP_TOKENS})
    for system in systems.values():
        system.generate(prompts[0], warm_up)
    names = list(systems)
    runs: dict[str, list[Generation]] = {name: [] for name in names}
    with Progress(len(prompts) * len(names), "compare", "answers") as progress:
        for i, prompt in enumerate(prompts):
            for name in (*names[i % len(names) :], *names[: i % len(names)]):
                runs[name].append(systems[name].generate(prompt, params))
                progress.advance()
    return runs


def logit_gap(reference: LoadedModel, prompts: Sequence[Sequence[int]]) -> GapMeter:
    """Measures the logit gap between two candidates with a plain forward pass of the reference model."""

    @torch.inference_mode()
    def gap(prompt: int, common: Sequence[int], one: int, other: int) -> float:
        ids = torch.tensor([[*prompts[prompt], *common]], device=reference.device)
        logits = reference.model(ids, logits_to_keep=1).logits[0, -1].float()
        return float((logits[one] - logits[other]).abs())

    return gap


def format_table(methods: dict[str, dict[str, Any]]) -> str:
    """The comparison for people."""
    header = f"{'method':<20} {'tok/s':>8} {'MAT':>6} {'×hf':>6} {'×vanilla':>8} {'=hf':>5} {'=vanilla':>8} {'gap':>8}"
    lines = [header + "   time: draft mask forward verify compact other"]
    for name, m in methods.items():
        cells = [
            f"{name:<20} {m['tokens_per_s']:>8.1f} {_cell(m['mat'], 6, 2)} {_cell(m['speedup_vs_hf'], 6, 2)}",
            f"{_cell(m['speedup_vs_vanilla'], 8, 2)} {_cell(m['identical_to_hf'], 5, 0)}",
            f"{_cell(m['identical_to_vanilla'], 8, 0)} {_cell(m['worst_divergence_gap'], 8, 4)}",
        ]
        share = m["time_share"]
        shares = " ".join(f"{100 * share[part]:.1f}%" for part in share) if share else "-"
        lines.append(" ".join(cells) + "   " + shares)
    return "\n".join([*lines, *_LEGEND])


def format_sources(methods: dict[str, dict[str, Any]]) -> str:
    """What each source proposed and what of it was accepted, for methods that draft."""
    lines = []
    for name, m in methods.items():
        if m["sources"]:
            parts = [f"{s} {c['accepted']}/{c['drafted']}" for s, c in m["sources"].items()]
            lines.append(f"{name:<20} accepted/drafted: {', '.join(parts)}")
    return "\n".join(lines)


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"
