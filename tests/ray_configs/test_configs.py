"""Every configuration is valid by Ray's own schemas, and names only settings and metrics that exist."""

from __future__ import annotations

import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve import Application
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve.schema import ServeDeploySchema

import cluster.retrieval.client
import serve_app.metrics
import serve_app.timed_corpus
from serve_app import ServeSettings
from serve_app.builder import build

CONFIGS = Path(__file__).parents[2] / "ray_configs"
SERVE = sorted((CONFIGS / "serve").glob("*.yaml"))
DASHBOARDS = sorted((CONFIGS / "dashboards").glob("*.json"))


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def check_serve_config(config: dict[str, Any]) -> list[ServeSettings]:
    """Validate a Serve configuration as ``serve deploy`` would, and the arguments as the builder would."""
    schema = ServeDeploySchema.model_validate(config)
    settings = []
    for application in schema.applications:
        module, name = application.import_path.split(":")
        assert getattr(import_module(module), name) is build
        settings.append(ServeSettings.model_validate(application.args))
    return settings


def test_there_are_configurations():
    assert SERVE
    assert DASHBOARDS


@pytest.mark.parametrize("path", SERVE, ids=lambda path: path.name)
def test_serve_configs(path):
    check_serve_config(load(path))


def test_the_single_machine_listens_on_loopback_and_needs_no_gpu():
    config = load(CONFIGS / "serve" / "single_machine.yaml")
    assert config["http_options"]["host"] == "127.0.0.1"
    (settings,) = check_serve_config(config)
    build(settings)


def test_serve_makes_settings_of_the_arguments():
    config = load(CONFIGS / "serve" / "single_machine.yaml")
    builder: Any = build
    application = call_user_app_builder_with_args_if_necessary(builder, config["applications"][0]["args"])
    assert isinstance(application, Application)
    with pytest.raises(ValidationError, match="modle"):
        call_user_app_builder_with_args_if_necessary(builder, {"modle": "x"})


def test_the_gpu_cluster_has_workers_for_every_replica():
    (settings,) = check_serve_config(load(CONFIGS / "serve" / "gpu_cluster.yaml"))
    models = settings.served_models()
    assert all(model.num_gpus == 1 and model.device == "cuda" for model in models)
    cluster = load(CONFIGS / "cluster" / "gpu_cluster.yaml")
    workers = cluster["available_node_types"]["gpu_worker"]
    assert workers["min_workers"] >= sum(model.replicas for model in models)
    assert workers["max_workers"] >= sum(model.max_replicas or model.replicas for model in models)


def test_the_cluster_config_is_what_ray_up_takes():
    validate_config(prepare_config(load(CONFIGS / "cluster" / "gpu_cluster.yaml")))


def test_the_rayservice():
    service = load(CONFIGS / "kubernetes" / "rayservice.yaml")
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    assert set(service["spec"]) == {"serveConfigV2", "rayClusterConfig"}
    (settings,) = check_serve_config(yaml.safe_load(service["spec"]["serveConfigV2"]))
    cluster = service["spec"]["rayClusterConfig"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    for group in (head, workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        for container in group["template"]["spec"]["containers"]:
            assert set(container["resources"]) == {"requests", "limits"}
    (container,) = workers["template"]["spec"]["containers"]
    (model,) = settings.served_models()
    limits = container["resources"]["limits"]
    assert limits["nvidia.com/gpu"] >= (model.num_gpus or 0)
    assert int(limits["cpu"]) >= (model.num_cpus or 1) + settings.ingress_num_cpus
    assert workers["maxReplicas"] >= (model.max_replicas or model.replicas)


def test_the_images_ray_is_the_clusters():
    service = load(CONFIGS / "kubernetes" / "rayservice.yaml")
    dockerfile = (CONFIGS / "kubernetes" / "Dockerfile").read_text()
    assert f"rayproject/ray:{service['spec']['rayClusterConfig']['rayVersion']}-" in dockerfile


def exported_metrics() -> set[str]:
    """Names under which Prometheus finds the metrics that a replica declares."""
    modules = (serve_app.metrics, serve_app.timed_corpus, cluster.retrieval.client)
    source = "".join(inspect.getsource(module) for module in modules)
    declared = re.findall(r'(Counter|Gauge|Histogram)\(\s*"(logitspec_\w+)"', source)
    suffixes = {"Counter": ("_total",), "Gauge": ("",), "Histogram": ("_bucket", "_sum", "_count")}
    return {f"ray_{name}{suffix}" for kind, name in declared for suffix in suffixes[kind]}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_dashboards_ask_for_metrics_that_exist(path):
    dashboard = json.loads(path.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    variables = [v["query"]["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    asked = {name for text in expressions + variables for name in re.findall(r"ray_logitspec_\w+", text)}
    assert asked
    assert asked <= exported_metrics()
    for expression in expressions:
        assert expression.count("(") == expression.count(")")
        assert expression.count("{") == expression.count("}")


def test_every_metric_is_on_a_dashboard():
    text = "".join(path.read_text() for path in DASHBOARDS)
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported_metrics()}
    missing = {name for name in families if name not in text}
    assert missing <= {"ray_logitspec_computed_tokens_total"}
