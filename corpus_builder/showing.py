"""What a corpus is and what it answers, as text for people and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cluster.retrieval import LookupResult, Manifest


def summary(manifest: Manifest) -> dict[str, Any]:
    """The figures of a corpus as one flat object, with the list of its shards."""
    token_bytes = sum(file.bytes for file in manifest.token_files or ())
    return {
        "corpus_id": manifest.corpus_id,
        "tokenizer": manifest.tokenizer.name,
        "tokenizer_fingerprint": manifest.tokenizer.fingerprint,
        "documents": manifest.documents,
        "tokens": manifest.tokens,
        "ngrams": manifest.ngrams,
        "entries": manifest.entries,
        "bytes": manifest.shard_bytes + token_bytes,
        "shard_bytes": manifest.shard_bytes,
        "token_file_bytes": token_bytes,
        "bytes_per_token": round(manifest.shard_bytes / max(1, manifest.tokens), 2),
        "shards": len(manifest.shards),
        "vocabulary": manifest.vocabulary,
        **manifest.parameters.model_dump(mode="json"),
        "effective_min_count": manifest.effective_min_count,
        "generation": manifest.generation,
        "appendable": manifest.token_files is not None,
        "problems": manifest.problems,
        "shard_files": [shard.model_dump() for shard in manifest.shards],
    }


def describe(manifest: Manifest) -> str:
    """The same in a few lines."""
    figures = summary(manifest)
    sizes = ", ".join(str(size) for size in manifest.parameters.sizes)
    lines = [
        f"corpus      {manifest.corpus_id}, tokenizer of {manifest.tokenizer.name}",
        f"documents   {manifest.documents:,}",
        f"tokens      {manifest.tokens:,}",
        f"n-grams     {manifest.ngrams:,} of {sizes} tokens",
        f"shards      {len(manifest.shards)}, {_megabytes(manifest.shard_bytes)}, "
        f"{figures['bytes_per_token']} bytes a token",
    ]
    if manifest.token_files is not None:
        lines.append(f"documents'  {_megabytes(figures['token_file_bytes'])} of token files, for append")
    if manifest.effective_min_count > 1:
        lines.append(f"pruned      n-grams seen fewer than {manifest.effective_min_count} times")
    lines += [f"input       {count:,} × {kind.replace('_', ' ')}" for kind, count in manifest.problems.items()]
    return "\n".join(lines)


def tree(result: LookupResult, text_of: Callable[[int], str]) -> str:
    """The continuation trie of the first query as a printed tree; unbranched runs of equal counts share a line."""
    end = int(result.offsets[1])
    children: dict[int, list[int]] = {}
    for node in range(end):
        children.setdefault(int(result.parents[node]), []).append(node)
    total = int(result.totals[0])
    return "\n".join(_lines(result, children, -1, "", total, text_of))


def _lines(
    result: LookupResult,
    children: dict[int, list[int]],
    parent: int,
    indent: str,
    total: int,
    text_of: Callable[[int], str],
) -> Iterator[str]:
    siblings = children.get(parent, [])
    for place, node in enumerate(siblings):
        run = _run(result, children, node)
        text = "".join(text_of(int(result.tokens[n])) for n in run)
        count = int(result.counts[node])
        last = place == len(siblings) - 1
        yield f"{indent}{'└─' if last else '├─'} {text!r}  {count:,}  ({count / total:.0%})"
        yield from _lines(result, children, run[-1], indent + ("   " if last else "│  "), total, text_of)


def _run(result: LookupResult, children: dict[int, list[int]], node: int) -> list[int]:
    run = [node]
    while len(below := children.get(run[-1], [])) == 1 and result.counts[below[0]] == result.counts[node]:
        run.append(below[0])
    return run


def answer(result: LookupResult, text_of: Callable[[int], str]) -> dict[str, Any]:
    """The first query's answer as one object."""
    end = int(result.offsets[1])
    tokens: Sequence[int] = result.tokens[:end].tolist()
    return {
        "matched": int(result.matched[0]),
        "total": int(result.totals[0]),
        "tokens": tokens,
        "texts": [text_of(token) for token in tokens],
        "parents": result.parents[:end].tolist(),
        "counts": result.counts[:end].tolist(),
    }


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
