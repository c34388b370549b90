"""What this server calls itself."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

_DISTRIBUTION = "logitspec-cluster"


@cache
def server_version() -> str:
    """The installed version, or 0 where the project runs without being installed."""
    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:
        return "0"


@cache
def fingerprint() -> str:
    """``system_fingerprint``: answers to seeded requests are the same while it is."""
    return f"logitspec-{server_version()}"
