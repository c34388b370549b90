"""Options that several command lines share, and how their errors are told."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from pydantic import ValidationError

from cluster.decoding.params import METHODS
from cluster.engine import RequestError
from cluster.models import EMBEDDED_NAME, LoadedModel, ModelConfig, ModelError, tokenizer_fingerprint
from cluster.prompts import PromptFileError
from cluster.retrieval import Corpus, CorpusError, CorpusLookup


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """--model, --dtype, --device."""
    parser.add_argument(
        "--model", default=EMBEDDED_NAME, help="hub id, directory, GGUF file, or the embedded default (%(default)s)"
    )
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, … (default: a GPU if there is one)")


def add_method_options(parser: argparse.ArgumentParser) -> None:
    """--method, --capacity."""
    parser.add_argument("--method", default="adaptive", choices=METHODS, help="how to draft (default: %(default)s)")
    add_capacity_option(parser)


def add_capacity_option(parser: argparse.ArgumentParser) -> None:
    """--capacity."""
    parser.add_argument(
        "--capacity",
        type=int,
        help="nodes of the draft tree (default: what pays at each step; "
        "of methods other than adaptive 8 at most on a CPU, 64 on a GPU)",
    )


def add_corpus_options(parser: argparse.ArgumentParser) -> None:
    """--corpus, --retrieval."""
    parser.add_argument("--corpus", metavar="DIR", help="reference corpus to draft from, built by corpus_builder")
    parser.add_argument(
        "--retrieval",
        default="local",
        choices=["local", "actors"],
        help="map the corpus in this process, or ask its retrieval actors (default: %(default)s)",
    )


def open_corpus(args: argparse.Namespace, loaded: LoadedModel) -> CorpusLookup | None:
    """The corpus that the options name, if any.

    Raises:
        CorpusError: there is none, it is damaged, or it was built with another tokenizer.
    """
    if args.corpus is None:
        return None
    fingerprint = tokenizer_fingerprint(loaded.tokenizer)
    if args.retrieval == "local":
        return Corpus.open(args.corpus, tokenizer_fingerprint=fingerprint)
    from cluster.retrieval import client  # imports Ray, which only this way of asking needs

    return client.open_corpus(client.RetrievalConfig(corpus=args.corpus, mode="actors"), fingerprint)


def model_config(args: argparse.Namespace) -> ModelConfig:
    """The model that the options name."""
    return ModelConfig(model=args.model, dtype=args.dtype, device=args.device)


def run_command(command: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> int:
    """Run a command and return its exit code: 2, with one line on stderr, for errors a user can mend."""
    try:
        command(args)
    except ValidationError as error:
        for problem in error.errors():
            field = ".".join(str(part) for part in problem["loc"]) or "options"
            print(f"error: {field}: {problem['msg']}", file=sys.stderr)
        return 2
    except (ModelError, RequestError, PromptFileError, CorpusError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
