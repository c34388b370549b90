"""Step 2 of a build, as Ray Data's workers run it: a partition of the input becomes a token file."""

from __future__ import annotations

import os
from collections import Counter
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from cluster.models import ModelError, load_tokenizer, tokenizer_fingerprint
from cluster.retrieval import CorpusError
from corpus_builder.job import Job
from corpus_builder.plan import Partition
from corpus_builder.token_file import read_stats, write_tokens
from corpus_builder.tokenizing import Tokenizing
from corpus_builder.work_files import entry_of, exists, put


class TokenizeStep:
    """Makes the token file of one partition a call, or finds it made by an earlier, broken-off build.

    Workers run side by side, one a core, so the tokenizer must not start threads of its own.
    """

    def __init__(self, job: Job, fingerprint: str) -> None:
        self._job = job
        self._fingerprint = fingerprint  # of the tokenizer, which a worker keeps loaded

    def run(self, number: int, argument: Any) -> dict[str, Any]:
        """`argument` is the partition; the result is the file's entry, largest token id and problems."""
        target = self._job.token_file(number)
        if exists(target):
            file = entry_of(target)
        else:
            problems: Counter[str] = Counter()
            documents = self._tokenizing().documents(Partition.model_validate(argument), problems)
            counted = {kind: count for kind, count in problems.items() if count}
            file = put(target, lambda path: write_tokens(path, documents, counted))
        stats = read_stats(target)
        entry = {**file.model_dump(), "documents": stats.documents, "tokens": stats.tokens}
        return {"entry": entry, "largest": stats.largest, "problems": stats.problems}

    def _tokenizing(self) -> Tokenizing:
        tokenizer = _loaded(self._job.tokenizer, self._fingerprint)
        return Tokenizing(tokenizer, self._job.fields, self._job.parameters.sizes[0] + 1)


@lru_cache(maxsize=1)
def _loaded(name: str, fingerprint: str) -> PreTrainedTokenizerBase:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        tokenizer = load_tokenizer(name)
    except ModelError as error:
        raise CorpusError(str(error)) from error
    if tokenizer_fingerprint(tokenizer) != fingerprint:
        raise CorpusError(f"the tokenizer of {name} is not the same on all nodes; give each node the same model")
    return tokenizer
