"""Building the Serve application from its settings."""

# No `from __future__ import annotations`: Serve reads the builder's annotation, and wants the class and not its name.
import re
from typing import Any

import ray
import torch
from ray import serve
from ray.serve import Application

from serve_app.ingress import Ingress, api_keys
from serve_app.settings import ModelSettings, ServeSettings
from serve_app.target_model import TargetModel

_INGRESS_ONGOING = 4096  # requests an ingress holds at once; the models' own bounds come long before


def build(settings: ServeSettings) -> Application:
    """The application: ``serve run serve_app:build model=… method=…``.

    Raises:
        ModelError: the embedded model's name, directory or file in the settings does not exist here.
    """
    names = _deployment_names([model.served_name for model in settings.served_models()])
    models = [
        (model, serve.deployment(name=name, **_target_options(model))(TargetModel).bind(model))
        for model, name in zip(settings.served_models(), names, strict=True)
    ]
    ingress = serve.deployment(
        name="Ingress",
        num_replicas=settings.ingress_replicas,
        max_ongoing_requests=_INGRESS_ONGOING,
        ray_actor_options={"num_cpus": settings.ingress_num_cpus},
        max_surge_percent=100,  # a new one is up before an old one goes
        graceful_shutdown_timeout_s=settings.limits.request_timeout_s,
    )(Ingress)
    return ingress.bind(models, settings.limits, bool(api_keys()))


def _deployment_names(served: list[str]) -> list[str]:
    """``TargetModel``, or one name for each of several models; Serve wants them plain."""
    if len(served) == 1:
        return ["TargetModel"]
    names = ["TargetModel-" + re.sub(r"[^A-Za-z0-9_.-]", "-", name) for name in served]
    return [name if names.count(name) == 1 else f"{name}-{i}" for i, name in enumerate(names)]


def _target_options(model: ModelSettings) -> dict[str, Any]:
    """Serve's options for a model's deployment.

    A replica holds twice what its engine runs at once, so that the next request is at hand when one finishes.
    """
    actor: dict[str, Any] = {
        "num_cpus": model.num_cpus or 1,
        "num_gpus": _gpus(model),
        "resources": model.resources,
    }
    options: dict[str, Any] = {
        "ray_actor_options": actor,
        "max_ongoing_requests": 2 * model.max_sequences,
        "max_queued_requests": model.max_queued_requests,
        "health_check_period_s": 2,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": 120,
    }
    if model.max_replicas is None:
        return options | {"num_replicas": model.replicas}
    target = model.target_ongoing_requests or max(1, model.max_sequences // 2)
    autoscaling = {
        "min_replicas": model.replicas,
        "max_replicas": model.max_replicas,
        "target_ongoing_requests": target,
    }
    return options | {"autoscaling_config": autoscaling}


def _gpus(model: ModelSettings) -> float:
    """GPUs of a replica: as set, else by its device."""
    if model.num_gpus is not None:
        return model.num_gpus
    if model.device != "auto":
        return float(model.device.startswith("cuda"))
    seen = ray.cluster_resources().get("GPU", 0) if ray.is_initialized() else torch.cuda.device_count()
    return float(seen > 0)
