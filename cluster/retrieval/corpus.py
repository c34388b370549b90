"""A corpus mapped into this process: lookups without any round trip."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cluster.retrieval import hashing, kernels
from cluster.retrieval.errors import CorpusError
from cluster.retrieval.lookup import Finished, LookupResult
from cluster.retrieval.manifest import Manifest
from cluster.retrieval.shard_file import Shard, map_shard
from cluster.retrieval.storage import Location, check_sum, local_file, read_manifest


class Corpus:
    """Some or all shards of a corpus, memory-mapped. Threads may share one; it is a `CorpusLookup`.

    A query whose shard is not among the mapped ones finds nothing.
    """

    def __init__(self, manifest: Manifest, shards: dict[int, Shard]) -> None:
        self.manifest = manifest
        self._shards = shards  # keeps the mappings alive that the addresses below point into
        self._sizes = np.array(sorted(manifest.parameters.sizes, reverse=True), np.int64)
        self._tables = np.zeros((len(manifest.shards), kernels.TABLE_COLUMNS), np.int64)
        for index, shard in shards.items():
            self._tables[index] = _table_row(shard)

    @staticmethod
    def open(
        directory: str | Path,
        *,
        tokenizer_fingerprint: str | None = None,
        shards: Iterable[int] | None = None,
        cache: Path | None = None,
    ) -> Corpus:
        """Map the corpus in a local directory or at a URI, whose shards are then copied to the cache first.

        Args:
            directory: where the manifest lies.
            tokenizer_fingerprint: of the tokenizer in use; a corpus of another one is refused.
            shards: the shards to map; None means all.
            cache: the directory for copies of remote shards instead of the default.

        Raises CorpusError: no corpus, another format version or tokenizer, a file missing or damaged.
        """
        location = Location.parse(directory)
        manifest = read_manifest(location)
        if tokenizer_fingerprint is not None:
            check_tokenizer(manifest, tokenizer_fingerprint, location.text)
        mapped = {}
        for index in range(len(manifest.shards)) if shards is None else shards:
            if not 0 <= index < len(manifest.shards):
                raise CorpusError(f"{location.text} has {len(manifest.shards)} shards, so there is no shard {index}")
            mapped[index] = map_shard(local_file(location, manifest.shards[index], manifest.corpus_id, cache), index)
        return Corpus(manifest, mapped)

    @property
    def sizes(self) -> tuple[int, ...]:
        """n-gram sizes of the corpus, rising."""
        return self.manifest.parameters.sizes

    def lookup(
        self, queries: NDArray[np.int32], lengths: NDArray[np.int32], max_nodes: int | NDArray[np.int32] = 64
    ) -> LookupResult:
        """See `CorpusLookup.lookup`."""
        limits = np.full(len(queries), max_nodes, np.int32) if isinstance(max_nodes, int) else max_nodes
        hits = kernels.find(
            queries,
            np.minimum(lengths, queries.shape[1]),
            limits,
            self._sizes,
            self._tables,
            self.manifest.parameters.chain,
            np.uint64(hashing.FINGERPRINT_MASK),
        )
        offsets = np.zeros(len(queries) + 1, np.int32)
        np.cumsum(hits[:, kernels.NODES], out=offsets[1:])
        nodes = np.empty((3, offsets[-1]), np.int32)
        kernels.unfold(hits, self._tables, offsets, nodes[0], nodes[1], nodes[2], self.manifest.vocabulary)
        return LookupResult(
            hits[:, kernels.SIZE].astype(np.int8), hits[:, kernels.TOTAL].astype(np.int32), offsets, *nodes
        )

    def warm_up(self) -> None:
        """Load the compiled code, which a first lookup would wait for."""
        self.lookup(np.zeros((1, self.sizes[-1]), np.int32), np.array([self.sizes[-1]], np.int32), 1)

    def submit(
        self, queries: NDArray[np.int32], lengths: NDArray[np.int32], max_nodes: int | NDArray[np.int32] = 64
    ) -> Finished:
        """See `CorpusLookup.submit`; there is no round trip here, so the work is done at once."""
        return Finished(self.lookup(queries, lengths, max_nodes))


def check_tokenizer(manifest: Manifest, fingerprint: str, where: str) -> None:
    """Raise CorpusError, naming both tokenizers, unless the corpus was built with this one."""
    if manifest.tokenizer.fingerprint != fingerprint:
        raise CorpusError(
            f"{where} was built with the tokenizer of {manifest.tokenizer.name} "
            f"({manifest.tokenizer.fingerprint}), but the model's tokenizer is {fingerprint}; "
            "build a corpus with the model's tokenizer"
        )


def verify(directory: str | Path, cache: Path | None = None) -> list[str]:
    """Check every file of a corpus against size and checksum in its manifest.

    Returns one message for each bad file. Raises CorpusError when there is no readable manifest.
    """
    location = Location.parse(directory)
    manifest = read_manifest(location)
    messages = []
    for entry in (*manifest.shards, *(manifest.token_files or ())):
        try:
            check_sum(local_file(location, entry, manifest.corpus_id, cache), entry)
        except CorpusError as error:
            messages.append(str(error))
    return messages


def _table_row(shard: Shard) -> list[int]:
    """A shard's row of the kernels' table."""
    arrays = (shard.slots, shard.pool, shard.tries, shard.edges)
    if not all(array.flags.c_contiguous for array in arrays):
        raise CorpusError("a shard's arrays are not contiguous; rebuild the corpus")
    slots, pool, tries, edges = (array.ctypes.data for array in arrays)
    return [
        slots,
        len(shard.slots),
        shard.home_slots,
        pool,
        len(shard.pool),
        tries,
        len(shard.tries),
        edges,
        len(shard.edges),
    ]
