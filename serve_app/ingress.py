"""The deployment that takes HTTP requests."""

from __future__ import annotations

import os

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.models import load_tokenizer
from serve_app.backend import ReplicaBackend
from serve_app.openai_api.app import create_app
from serve_app.openai_api.served_model import ServedModel
from serve_app.settings import API_KEYS_VARIABLE, Limits, ModelSettings


def api_keys() -> frozenset[str]:
    """The keys in the environment, separated by commas; empty: no key is asked for."""
    return frozenset(key.strip() for key in os.environ.get(API_KEYS_VARIABLE, "").split(",") if key.strip())


@serve.ingress()
class Ingress:
    """Validates, applies chat templates, tokenizes, and streams what the target models answer."""

    def __init__(
        self, models: list[tuple[ModelSettings, DeploymentHandle]], limits: Limits, needs_api_keys: bool
    ) -> None:
        """Load the tokenizers.

        Raises:
            ModelError: a tokenizer cannot be loaded here.
            RuntimeError: the application was built with API keys in the environment, but there are none here.
        """
        self._limits = limits
        self._keys = api_keys()
        if needs_api_keys and not self._keys:
            raise RuntimeError(
                f"{API_KEYS_VARIABLE} was set where the application was built, but is not set in the "
                "cluster; set it where Ray is started, or under runtime_env.env_vars of the application"
            )
        self._models = [
            ServedModel(
                settings,
                load_tokenizer(
                    settings.model, trust_remote_code=settings.trust_remote_code, revision=settings.revision
                ),
                ReplicaBackend(settings.served_name, handle, limits.retry_after_s),
            )
            for settings, handle in models
        ]

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve after the constructor."""
        return create_app(self._models, self._limits, self._keys)
