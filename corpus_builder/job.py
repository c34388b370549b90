"""What the workers of one build share: parameters, and where its files lie."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.retrieval import BuildParameters
from cluster.retrieval.storage import Location

WORK_FOLDER = ".build"


@dataclass(frozen=True, slots=True)
class Job:
    """One build.

    Attributes:
        out: directory or URI of the corpus.
        tokenizer: model whose tokenizer is used.
        fields: as for `DocumentMaker`.
        parameters: of the corpus.
        shards: their number; 0 until it is known.
        generation: how often the corpus in `out` was appended to or replaced before.
        keep_tokens: whether token files belong to the corpus.
    """

    out: str
    tokenizer: str
    fields: tuple[str, ...] | None
    parameters: BuildParameters
    shards: int
    generation: int
    keep_tokens: bool

    @property
    def directory(self) -> Location:
        """Where the corpus goes."""
        return Location.parse(self.out)

    @property
    def work(self) -> Location:
        """Where files lie that are gone when the build is done."""
        return self.directory.child(WORK_FOLDER)

    def shard_file(self, shard: int) -> Location:
        """A shard."""
        return self.directory.child(self._name("shard", shard))

    def token_file(self, number: int) -> Location:
        """The token file of a partition of this build."""
        folder = self.directory if self.keep_tokens else self.work
        return folder.child(self._name("tokens", number))

    def fragment_file(self, number: int) -> Location:
        """The fragments of a token file, counted over the whole corpus."""
        return self.work.child(f"fragments-{number:05d}.arrow")

    def aggregate_file(self, shard: int) -> Location:
        """A shard before pruning."""
        return self.work.child(f"aggregate-{shard:05d}.npz")

    def _name(self, kind: str, number: int) -> str:
        generation = f".g{self.generation}" if self.generation else ""
        return f"{kind}-{number:05d}{generation}.arrow"
