"""The OpenAPI schema is served and true: requests made from it, valid and not, are answered as it says."""

from __future__ import annotations

import threading
import time

import httpx
import hypothesis
import pytest
import schemathesis
import uvicorn
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

from cluster.engine import Engine, EngineConfig
from serve_app.settings import Limits
from tests.serve_app.conftest import LocalBackend, make_app
from tests.serve_app.deployment import free_port


@pytest.fixture(scope="module")
def server(tiny_loaded, tiny_model):
    """A real HTTP server over an engine whose answers are short."""
    backend = LocalBackend(Engine(tiny_loaded, EngineConfig(kv_cache_gib=0.01, max_model_len=64)))
    app = make_app(backend, tiny_model, Limits(max_choices=3))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=free_port(), log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{server.config.port}"
    server.should_exit = True
    thread.join(10)
    backend.engine.close()


@pytest.fixture(scope="module")
def api(server):
    return schemathesis.openapi.from_url(f"{server}/openapi.json")


OPERATIONS = [
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{model}", "GET"),
    ("/health", "GET"),
    ("/version", "GET"),
]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_answers_are_as_the_schema_says(api, path, method, mode):
    operation = api[path][method]
    if mode is GenerationMode.NEGATIVE and not operation.body:
        pytest.skip("there is nothing to get wrong")

    @hypothesis.settings(
        max_examples=30,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def check(case):
        started = time.monotonic()
        response = case.call(timeout=30)
        case.validate_response(response, excluded_checks=[checks.positive_data_acceptance])
        assert response.status_code < 500
        assert time.monotonic() - started < 25
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    check()


def test_the_operations_are_all_there_are(api):
    found = {(operation.ok().path, operation.ok().method.upper()) for operation in api.get_all_operations()}
    assert found == set(OPERATIONS)


def test_the_schema_names_the_models(server):
    document = httpx.get(f"{server}/openapi.json").json()
    for body in ("ChatCompletionRequest", "CompletionRequest"):
        assert document["components"]["schemas"][body]["properties"]["model"]["enum"] == ["tiny"]
    assert "/v1/chat/completions" in document["paths"]
