"""From documents to token ids, a partition at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from corpus_builder.documents import DocumentMaker, Problem
from corpus_builder.plan import Partition
from corpus_builder.reading import read_rows

PIECE = 1 << 20  # characters of a document that are tokenized at a time
_BATCH = 1 << 20  # characters given to the tokenizer in one call
_SEARCH = 1 << 16  # how far back from a piece's end white space is looked for


class Tokenizing:
    """Reads partitions and turns their documents into token ids.

    Args:
        tokenizer: None when all documents are token ids already.
        fields: as for `DocumentMaker`.
        shortest: tokens that a document needs to have one n-gram with a continuation.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, fields: Sequence[str] | None, shortest: int) -> None:
        self._tokenizer = tokenizer
        self._fields = fields
        self._shortest = shortest

    def documents(self, partition: Partition, problems: Counter[str]) -> list[NDArray[np.int32]]:
        """All documents of a partition in order, none of them empty. Raises CorpusError."""
        maker = DocumentMaker(self._fields, self._tokenizer, problems)
        made = (maker.make(row) for row in read_rows(partition, problems))
        found = []
        for document in self._tokenized(document for document in made if document is not None):
            if len(document) == 0:
                problems[Problem.EMPTY] += 1
                continue
            problems[Problem.SHORT] += len(document) < self._shortest
            found.append(document)
        return found

    def _tokenized(self, documents: Iterable[str | NDArray[np.int32]]) -> Iterator[NDArray[np.int32]]:
        batch: list[str | NDArray[np.int32]] = []
        size = 0
        for document in documents:
            batch.append(document)
            size += len(document)
            if size >= _BATCH:
                yield from self._tokenize_batch(batch)
                batch, size = [], 0
        yield from self._tokenize_batch(batch)

    def _tokenize_batch(self, batch: Sequence[str | NDArray[np.int32]]) -> Iterator[NDArray[np.int32]]:
        """Each document's ids; texts are cut into pieces, and all pieces tokenized in few calls."""
        pieces = [list(split_text(item)) if isinstance(item, str) else [] for item in batch]
        ids = self._encode([piece for group in pieces for piece in group])
        for item, group in zip(batch, pieces, strict=True):
            if isinstance(item, str):
                yield np.concatenate([next(ids) for _ in group]) if group else np.zeros(0, np.int32)
            else:
                yield item

    def _encode(self, texts: Sequence[str]) -> Iterator[NDArray[np.int32]]:
        if self._tokenizer is None or not texts:
            return
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:  # a tokenizer written in Python
            for text in texts:
                yield np.array(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
            return
        for group in _groups(texts):
            for encoding in backend.encode_batch_fast(group, add_special_tokens=False):
                yield np.array(encoding.ids, np.int32)


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    """Texts a few at a time, so that the encodings of one call stay small."""
    group: list[str] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= _BATCH:
            yield group
            group, size = [], 0
    if group:
        yield group


def split_text(text: str) -> Iterator[str]:
    """Pieces of up to `PIECE` characters that together are the text.

    A piece ends before white space: byte-level and word-level tokenizers do not join what is on both sides.
    """
    start = 0
    while len(text) - start > PIECE:
        end = _boundary(text, start + PIECE)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _boundary(text: str, end: int) -> int:
    """The last place up to `end`, and not far from it, with white space after it and none before it."""
    for i in range(end, end - _SEARCH, -1):
        if text[i].isspace() and not text[i - 1].isspace():
            return i
    return end
