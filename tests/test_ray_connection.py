"""Joining a Ray cluster that is not there."""

from __future__ import annotations

import socket

import pytest

from cluster.ray_connection import NoCluster, connect


def test_a_cluster_that_is_not_there_is_said_to_be_missing_at_once():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(NoCluster, match=f"{address}; start one"):
        connect(address)


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "nowhere.invalid:6379"])
def test_addresses_that_are_none(address):
    with pytest.raises(NoCluster, match=address):
        connect(address)
