"""Reading a GGUF file's header: metadata and the table of tensors, with the checks that tell a sound file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (little-endian, versions 2 and 3).
"""

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from cluster.models.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor's entry: its shape (fastest dimension first, as ggml counts) and its place in the file."""

    name: str
    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    offset: int

    @property
    def elements(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes it takes in the file."""
        block, block_bytes = GGML_QUANT_SIZES[self.quantization]
        return self.elements // block * block_bytes


@dataclass(frozen=True)
class GgufHeader:
    """A GGUF file's metadata, by key, and its tensors. Tensor offsets count from `data_start` bytes."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data_start: int

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self.metadata["general.architecture"])

    @property
    def elements(self) -> int:
        """Number of weights in all tensors."""
        return sum(tensor.elements for tensor in self.tensors.values())


def read_header(path: Path) -> GgufHeader:
    """Read a GGUF file's header and check that all its tensors are in the file.

    Raises ModelError when it is no GGUF file, an unknown version, cut short, or one part of a split model.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _parse(path, data)
            size = len(data)
    except (struct.error, UnicodeDecodeError, EOFError) as error:
        raise _cut_short(path) from error
    except (OSError, ValueError) as error:  # mmap raises ValueError for an empty file
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"cannot read {path}: {error}") from error
    ends = (header.data_start + tensor.offset + tensor.nbytes for tensor in header.tensors.values())
    if max(ends, default=0) > size:
        raise _cut_short(path)
    return header


def _parse(path: Path, data: mmap.mmap) -> GgufHeader:
    if data[:4] != _MAGIC:
        raise ModelError(f"{path} is no GGUF file: it does not start with the letters GGUF")
    cursor = _Cursor(data, 4)
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise ModelError(f"{path} has GGUF version {version}; versions 2 and 3 (little-endian) can be read")
    tensor_count, metadata_count = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {cursor.string(): cursor.value() for _ in range(metadata_count)}
    if "general.architecture" not in metadata:
        raise ModelError(f"{path} does not name an architecture, so it holds no model")
    if metadata.get("split.count", 1) > 1:
        raise ModelError(f"{path} is one part of a split model; merge the parts with llama.cpp's gguf-split")
    tensors = [cursor.tensor() for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    data_start = -(-cursor.position // alignment) * alignment
    return GgufHeader(path, metadata, {tensor.name: tensor for tensor in tensors}, data_start)


def _cut_short(path: Path) -> ModelError:
    return ModelError(f"{path} is cut short or damaged; fetch or copy it again")


class _Cursor:
    """Reads values one after another. Running past the end raises struct.error or EOFError."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self.data = data
        self.position = position
        self._array_readers: dict[int, Callable[[], Any]] = {_STRING: self.string, _ARRAY: self.array}

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.position)
        self.position += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        raw = self.data[self.position : self.position + length]
        if len(raw) != length:
            raise EOFError
        self.position += length
        return raw.decode("utf-8")

    def array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in self._array_readers:
            read = self._array_readers[kind]
            return [read() for _ in range(count)]
        return list(self._scalars(kind, count))

    def value(self) -> Any:
        kind = self.scalar("I")
        if kind in self._array_readers:
            return self._array_readers[kind]()
        return self._scalars(kind, 1)[0]

    def tensor(self) -> GgufTensor:
        name = self.string()
        shape = tuple(self.scalar("Q") for _ in range(self.scalar("I")))
        kind, offset = self.scalar("I"), self.scalar("Q")
        try:
            quantization = GGMLQuantizationType(kind)
        except ValueError as error:
            raise ModelError(f"tensor {name} has the unknown quantization type {kind}") from error
        return GgufTensor(name, shape, quantization, offset)

    def _scalars(self, kind: int, count: int) -> tuple[Any, ...]:
        if kind not in _SCALARS:
            raise EOFError  # no such type: the bytes here are not what the header says
        width = struct.calcsize(f"<{_SCALARS[kind]}")
        if self.position + width * count > len(self.data):
            raise EOFError
        values = struct.unpack_from(f"<{count}{_SCALARS[kind]}", self.data, self.position)
        self.position += width * count
        return values
