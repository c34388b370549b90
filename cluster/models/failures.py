"""Turning what libraries raise while loading into one error a user can act on."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import torch
from huggingface_hub import errors as hub
from safetensors import SafetensorError

from cluster.models.cache import cache_dir, is_no_space, no_space
from cluster.models.errors import ModelError

_REASONS: list[tuple[type[BaseException] | tuple[type[BaseException], ...], str]] = [
    (
        hub.GatedRepoError,
        "the repository is gated: accept its terms on the hub and log in with `hf auth login`, or give a "
        "local directory",
    ),
    (
        hub.RepositoryNotFoundError,
        "the hub has no such repository, or it is private and you have no access",
    ),
    (hub.RevisionNotFoundError, "the repository has no such revision"),
    (
        (hub.OfflineModeIsEnabled, hub.LocalEntryNotFoundError, httpx.TransportError),
        "it is not in the local hub cache and the hub is not reachable; give a local directory or a .gguf "
        "file, or use the embedded model",
    ),
    (SafetensorError, "its safetensors weights are corrupt or incomplete; fetch or copy them again"),
    (torch.OutOfMemoryError, "the device has too little free memory for it; use a smaller dtype or model"),
]


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise whatever goes wrong inside as a ModelError that names `what` and the reason.

    Libraries and models with their own code raise nearly any type, so every Exception is taken.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        if any(is_no_space(link) for link in _chain(error)):
            raise no_space(cache_dir()) from error
        raise ModelError(f"cannot load {what}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    for link in _chain(error):
        for types, reason in _REASONS:
            if isinstance(link, types):
                return reason
    if "trust_remote_code" in str(error):
        return "it brings its own Python code; if you trust it, set trust_remote_code"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, its cause, the cause's cause and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
