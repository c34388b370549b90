"""Connecting to Ray: quietly, and with failures that say what to do."""

from __future__ import annotations

import logging
import socket
from typing import Any

import ray

_ANSWERS_WITHIN_S = 5.0


class ClusterError(RuntimeError):
    """There is no Ray to be had where it was sought; the message says why and what to do."""


class NoCluster(ClusterError):
    """No cluster runs there."""


def connect(address: str | None, **options: Any) -> None:
    """``ray.init`` with this address: of a cluster, ``auto``, ``local``, or None for what Ray finds or else starts.

    Raises:
        NoCluster: nobody answers there.
        ClusterError: it cannot be joined, or Ray's processes do not come up.
    """
    if address is not None and not _answers(address):
        raise NoCluster(f"no Ray cluster answers at {address}; start one with ray start --head or name another one")
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # which is what Ray raises, bare, in many cases
        reason = " ".join(str(error).split())
        if address == "local":
            raise ClusterError(f"Ray does not start on this machine: {reason}") from error
        hint = "if it wants a token, set RAY_AUTH_MODE=token"
        if isinstance(error, ConnectionError):
            raise NoCluster(f"{reason}; {hint}") from error
        raise ClusterError(f"cannot join the Ray cluster: {reason}; {hint}") from error


def _answers(address: str) -> bool:
    """Whether somebody listens at HOST:PORT, for which Ray itself would wait for minutes; True for other addresses."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "/" in address:
        return True
    try:
        socket.create_connection((host, int(port)), _ANSWERS_WITHIN_S).close()
    except (OSError, OverflowError):
        return False
    return True
