"""A private Ray cluster with an application on it, for tests of the whole path."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from serve_app import ServeSettings, build


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def private_ray(cpus: int = 4) -> Iterator[None]:
    """A Ray instance of this process alone, ended with it."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.pop("RAY_ADDRESS", None)
    ray.init(
        address="local",
        namespace=f"serve-tests-{os.getpid()}",
        num_cpus=cpus,
        num_gpus=0,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        logging_level=logging.WARNING,
        log_to_driver=False,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}},
        _system_config={"metrics_report_interval_ms": 500},
    )
    try:
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


@contextmanager
def deployed(**arguments: Any) -> Iterator[str]:
    """The application on a private cluster; gives its base URL."""
    port = free_port()
    with private_ray():
        serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
        deploy(**arguments)
        yield f"http://127.0.0.1:{port}"


def deploy(**arguments: Any) -> None:
    """Put the application on the cluster, or change it there."""
    serve.run(build(ServeSettings.model_validate(arguments)), name="default", route_prefix="/")


def metric(name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels, as Prometheus would read it from this node."""
    (node,) = ray.nodes()
    page = httpx.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=10).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name in (name, f"{name}_total") and labels.items() <= sample.labels.items()
    )


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for ``condition()`` to be true, and fail if it never is."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s in vain"
        time.sleep(0.2)
