"""The commands that tokenize text: build, append, query."""

from __future__ import annotations

import argparse
import json
import time

from cluster.models import EMBEDDED_NAME, tokenizer_fingerprint
from cluster.prompts import PromptFileError, check_text
from cluster.retrieval import BuildParameters, Corpus, CorpusError, Manifest, as_queries, check_tokenizer
from corpus_builder.build import append, build, tokenizer_of
from corpus_builder.requests import BuildRequest, Execution
from corpus_builder.showing import answer, describe, tree


def build_command(args: argparse.Namespace) -> int:
    """build: text to corpus."""
    request = BuildRequest(
        inputs=tuple(args.input),
        out=args.out,
        tokenizer=args.tokenizer or EMBEDDED_NAME,
        fields=args.text_fields,
        kind=args.format,
        shards=args.shards,
        parameters=BuildParameters(
            sizes=args.sizes,
            depth=args.depth,
            max_nodes=args.max_nodes,
            min_count=args.min_count,
            max_bytes=args.max_bytes,
        ),
        keep_tokens=args.keep_tokens,
        overwrite=args.overwrite,
    )
    start = time.monotonic()
    _report(build(request, _execution(args)), time.monotonic() - start)
    return 0


def append_command(args: argparse.Namespace) -> int:
    """append: more text into a corpus."""
    start = time.monotonic()
    manifest = append(args.corpus, args.input, _execution(args), args.text_fields, args.format)
    _report(manifest, time.monotonic() - start)
    return 0


def query_command(args: argparse.Namespace) -> int:
    """query: what follows a text."""
    try:
        check_text(args.text, "the text")
    except PromptFileError as error:
        raise CorpusError(str(error)) from error
    corpus = Corpus.open(args.corpus)
    tokenizer = tokenizer_of(args.tokenizer or corpus.manifest.tokenizer.name)
    check_tokenizer(corpus.manifest, tokenizer_fingerprint(tokenizer), args.corpus)
    ids = tokenizer(args.text, add_special_tokens=False)["input_ids"]
    queries, lengths = as_queries([ids], corpus.sizes[-1])
    result = corpus.lookup(queries, lengths, args.max_nodes)

    def text_of_token(token: int) -> str:
        return str(tokenizer.decode([token]))

    if args.json:
        print(json.dumps(answer(result, text_of_token)))
        return 0
    matched = int(result.matched[0])
    if not matched:
        print("the corpus does not know how this text goes on")
        return 0
    print(f"{tokenizer.decode(ids[len(ids) - matched :])!r} ({matched} tokens) is followed {result.totals[0]:,} times:")
    print(tree(result, text_of_token))
    return 0


def _execution(args: argparse.Namespace) -> Execution:
    return Execution(parallelism=args.parallelism, memory_mb=args.memory, ray_address=args.ray_address)


def _report(manifest: Manifest, seconds: float) -> None:
    print(describe(manifest))
    print(f"took        {seconds:.1f} s, {manifest.tokens / seconds:,.0f} tokens/s")
