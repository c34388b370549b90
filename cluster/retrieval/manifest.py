"""The manifest: what a corpus is, and the only thing that makes a directory one."""

from __future__ import annotations

import hashlib
import json
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.retrieval.errors import CorpusError
from cluster.retrieval.layout import FORMAT, FORMAT_VERSION, MAX_DEPTH, MAX_NODES, MAX_SIZE

MANIFEST_NAME = "manifest.json"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BuildParameters(_Strict):
    """What decides the content of a corpus, besides its documents and its tokenizer."""

    sizes: tuple[int, ...] = Field((1, 2, 3, 4), description="n-gram sizes, rising")
    depth: int = Field(10, ge=1, le=MAX_DEPTH, description="most tokens of a continuation")
    max_nodes: int = Field(64, ge=1, le=MAX_NODES, description="most nodes of a continuation trie")
    min_count: int = Field(1, ge=1, description="n-grams and trie nodes seen fewer times are dropped")
    max_bytes: int | None = Field(None, ge=1, description="budget for all shard files; None: no bound")

    @property
    def chain(self) -> int:
        """Most nodes of a trie without branches."""
        return min(self.depth, self.max_nodes)

    @model_validator(mode="after")
    def _rising_sizes(self) -> BuildParameters:
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError("n-gram sizes must rise and not repeat, as in 1,2,3,4")
        if self.sizes[0] < 1 or self.sizes[-1] > MAX_SIZE:
            raise ValueError(f"n-gram sizes must lie between 1 and {MAX_SIZE}")
        return self


class FileEntry(_Strict):
    """A file of the corpus."""

    name: str
    bytes: int = Field(ge=0)
    sha256: str


class ShardEntry(FileEntry):
    """A shard file; `ngrams` are those that a lookup finds, `entries` the slots they take."""

    positions: int = Field(ge=0)
    ngrams: int = Field(ge=0)
    entries: int = Field(ge=0)


class TokenFileEntry(FileEntry):
    """A file of documents as token ids."""

    documents: int = Field(ge=0)
    tokens: int = Field(ge=0)


class TokenizerEntry(_Strict):
    """The tokenizer whose ids the corpus speaks."""

    name: str
    fingerprint: str
    chat_template_sha256: str | None = Field(None, description="of the template that chats were rendered with")


class Manifest(_Strict):
    """Everything known of a corpus; see docs/corpus.md §2."""

    format: Literal["logitspec-corpus"] = "logitspec-corpus"
    version: Literal[1] = 1
    corpus_id: str
    tokenizer: TokenizerEntry
    vocabulary: int = Field(ge=1, le=1 << 31, description="one more than the largest token id that may occur")
    parameters: BuildParameters
    effective_min_count: int = Field(1, ge=1, description="what min_count became to keep to max_bytes")
    documents: int = Field(ge=0)
    tokens: int = Field(ge=0)
    positions: int = Field(ge=0)
    ngrams: int = Field(ge=0)
    entries: int = Field(ge=0)
    generation: int = Field(0, ge=0, description="how often the corpus was appended to or replaced in place")
    problems: dict[str, int] = Field(
        default_factory=dict, description="rows and documents skipped or repaired, by kind"
    )
    shards: tuple[ShardEntry, ...] = Field(min_length=1)
    token_files: tuple[TokenFileEntry, ...] | None = Field(None, description="None: not kept")

    @model_validator(mode="after")
    def _totals(self) -> Manifest:
        for total in ("positions", "ngrams", "entries"):
            if getattr(self, total) != sum(getattr(shard, total) for shard in self.shards):
                raise ValueError(f"{total} are not the sum of the shards'")
        if len({shard.name for shard in self.shards}) < len(self.shards):
            raise ValueError("two shards have one name")
        return self

    @property
    def shard_bytes(self) -> int:
        """Size of all shard files."""
        return sum(shard.bytes for shard in self.shards)

    def to_json(self) -> str:
        """The text of manifest.json; the same manifest gives the same text."""
        return self.model_dump_json(indent=1) + "\n"

    @staticmethod
    def parse(text: str | bytes, where: str) -> Manifest:
        """Read a manifest's text; `where` is for messages. Raises CorpusError."""
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{where} is damaged: {error}; rebuild or copy the corpus again") from error
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise CorpusError(f"{where} is not the manifest of a LogitSpec corpus")
        if raw.get("version") != FORMAT_VERSION:
            raise CorpusError(
                f"{where} has format version {raw.get('version')}, this program reads version "
                f"{FORMAT_VERSION}; rebuild the corpus or use the matching program"
            )
        try:
            return Manifest.model_validate(raw)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise CorpusError(f"{where} is damaged: {place}: {first['msg']}; rebuild the corpus") from error


def corpus_id(fingerprint: str, shard_checksums: list[str]) -> str:
    """Twelve hex digits that tell corpora apart: a hash of the tokenizer's and all shards' checksums."""
    return hashlib.sha256("\n".join([fingerprint, *shard_checksums]).encode()).hexdigest()[:12]
