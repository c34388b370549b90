"""What the string that names a model means. Looks at the file system, never at the network."""

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from cluster.models.errors import ModelError

EMBEDDED_NAME = "smollm2-135m-instruct"

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


class SourceKind(Enum):
    """Where a model comes from."""

    EMBEDDED = "embedded"
    DIRECTORY = "directory"
    GGUF = "gguf"
    HUB = "hub"


@dataclass(frozen=True)
class ModelSource:
    """A resolved model string.

    `location` is the absolute path of a directory or GGUF file, the hub id, or the embedded model's name.
    """

    kind: SourceKind
    name: str
    location: str


def resolve(model: str) -> ModelSource:
    """Resolve a model string; an existing path wins over a hub id of the same spelling.

    Raises ModelError when the string is no embedded name, model directory, GGUF file or hub id.
    """
    if model == EMBEDDED_NAME:
        return ModelSource(SourceKind.EMBEDDED, model, model)
    path = Path(model).expanduser()
    if model and path.is_dir():
        return _directory(path)
    if path.is_file():
        return _file(path)
    if _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return ModelSource(SourceKind.HUB, model, model)
    raise ModelError(
        f"no model {model!r}: there is no such file or directory, and it is neither the embedded model "
        f"({EMBEDDED_NAME}) nor a hub id of the form owner/name"
    )


def _directory(path: Path) -> ModelSource:
    if (path / "config.json").is_file():
        path = path.resolve()
        return ModelSource(SourceKind.DIRECTORY, path.name, str(path))
    files = sorted(path.glob("*.gguf"))
    hint = f"; to use the GGUF file in it, name the file: {files[0]}" if files else ""
    raise ModelError(f"{path} is no model directory: it has no config.json{hint}")


def _file(path: Path) -> ModelSource:
    if path.suffix == ".gguf":
        path = path.resolve()
        return ModelSource(SourceKind.GGUF, path.stem, str(path))
    raise ModelError(
        f"{path} is a file, but not a .gguf file; name a .gguf file or the directory that holds config.json"
    )
