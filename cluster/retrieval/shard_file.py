"""Shard files: writing one, and mapping one without copying (docs/corpus.md §2)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cluster.retrieval.errors import CorpusError
from cluster.retrieval.layout import FORMAT_VERSION

SCHEMA = pa.schema(
    [
        pa.field("slots", pa.large_list(pa.field("item", pa.uint64(), nullable=False)), nullable=False),
        pa.field("pool", pa.large_list(pa.field("item", pa.int32(), nullable=False)), nullable=False),
        pa.field("tries", pa.large_list(pa.field("item", pa.list_(pa.int32(), 4), nullable=False)), nullable=False),
        pa.field("edges", pa.large_list(pa.field("item", pa.list_(pa.int32(), 3), nullable=False)), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class Shard:
    """The arrays of one shard.

    Attributes:
        home_slots: slots a search can begin at; the table is a little longer.
        slots: uint64 [S].
        pool: int32 [P], token ids and separators.
        tries: int32 [T, 4].
        edges: int32 [E, 3].
    """

    home_slots: int
    slots: NDArray[np.uint64]
    pool: NDArray[np.int32]
    tries: NDArray[np.int32]
    edges: NDArray[np.int32]


def write_shard(path: Path, index: int, shard: Shard, notes: dict[bytes, bytes]) -> None:
    """Write a shard file, with `notes` in its metadata. The bytes are a function of the arguments alone."""
    metadata = {
        b"logitspec.format": str(FORMAT_VERSION).encode(),
        b"logitspec.shard": str(index).encode(),
        b"logitspec.home_slots": str(shard.home_slots).encode(),
        **notes,
    }
    schema = SCHEMA.with_metadata(metadata)
    arrays = [_one_row(getattr(shard, field.name), field.type) for field in schema]
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=schema))


def map_shard(path: Path, index: int) -> Shard:
    """Map the file of this shard; nothing is read but its footer. Raises CorpusError for any other or damaged file."""
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
            metadata = reader.schema.metadata or {}
            if metadata.get(b"logitspec.format") != str(FORMAT_VERSION).encode():
                raise CorpusError(
                    f"{path} is not a corpus shard of format version {FORMAT_VERSION}; rebuild the corpus"
                )
            if reader.schema.remove_metadata() != SCHEMA or reader.num_record_batches != 1:
                raise CorpusError(f"{path} does not have the columns of a corpus shard; rebuild the corpus")
            if metadata[b"logitspec.shard"] != str(index).encode():
                raise CorpusError(f"{path} holds another shard of a corpus; copy the files again")
            batch = reader.get_batch(0)
            home_slots = int(metadata[b"logitspec.home_slots"])
    except CorpusError:
        raise
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise CorpusError(f"{path} is damaged or cut short ({_first_line(error)}); rebuild or copy it again") from error
    return Shard(
        home_slots,
        _flat(batch["slots"]),
        _flat(batch["pool"]),
        _flat(batch["tries"]).reshape(-1, 4),
        _flat(batch["edges"]).reshape(-1, 3),
    )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _one_row(values: NDArray[Any], kind: pa.LargeListType) -> pa.Array:
    """A list array of one row holding all of `values`."""
    flat: pa.Array = pa.array(values.reshape(-1))
    if values.ndim == 2:
        flat = pa.FixedSizeListArray.from_arrays(flat, type=kind.value_type)
    return pa.LargeListArray.from_arrays(pa.array([0, len(flat)], pa.int64()), flat, type=kind)


def _flat(column: pa.LargeListArray) -> NDArray[Any]:
    """The values of a list column of one row, in place."""
    values = column.values
    if pa.types.is_fixed_size_list(values.type):
        values = values.values
    return values.to_numpy(zero_copy_only=True)
