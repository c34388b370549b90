"""API keys, body sizes, deadlines, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import httpx
import pytest
from ray.exceptions import TaskCancelledError

from cluster.engine import AsyncEngine, Engine, EngineConfig, EngineStopped, Request
from serve_app.openai_api.errors import ApiError, overloaded
from serve_app.settings import Limits
from tests.serve_app.conftest import LocalBackend, http_client, make_app, run
from tests.serve_app.test_errors import CHAT, GOOD, TEXT, check_error

LONG = GOOD | {"max_tokens": 480, "temperature": 0, "ignore_eos": True}


def send(app, method, path, **options) -> httpx.Response:
    async def steps():
        async with http_client(app) as client:
            return await client.request(method, path, **options)

    return run(steps())


async def idle(backend):
    """Wait until the engine has nothing to do, which must be soon."""
    for _ in range(200):
        if backend.engine.engine.load == (0, 0):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"still running: {backend.engine.engine.load}")


@pytest.fixture(scope="module")
def guarded(backend, tiny_model):
    return make_app(backend, tiny_model, Limits(max_body_bytes=2000), frozenset({"key-a", "key-b"}))


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic key-a", "key-a"])
def test_a_missing_key_is_asked_for(guarded, header):
    headers = {} if header is None else {"authorization": header}
    response = send(guarded, "POST", CHAT, json=GOOD, headers=headers)
    assert check_error(response, 401)["code"] == "missing_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["key", "key-a-and-more", "KEY-A", "clé"])
def test_a_wrong_key_is_refused(guarded, key):
    for path in ("/v1/models", "/v1/nothing"):
        response = send(guarded, "GET", path, headers={"authorization": f"Bearer {key}".encode()})
        assert check_error(response, 401)["code"] == "invalid_api_key"


def test_either_key_opens_and_health_needs_none(guarded):
    for key in ("key-a", "key-b"):
        headers = {"authorization": f"bearer {key}"}
        assert send(guarded, "POST", CHAT, json=GOOD, headers=headers).status_code == 200
    assert send(guarded, "GET", "/health").status_code == 200


def test_large_bodies_are_refused_by_their_declared_size_and_by_their_bytes(guarded):
    headers = {"authorization": "Bearer key-a", "content-type": "application/json"}
    content = json.dumps(GOOD | {"user": "x" * 3000}).encode()

    async def in_parts():
        for at in range(0, len(content), 100):
            yield content[at : at + 100]

    for body in (content, in_parts()):
        response = send(guarded, "POST", CHAT, content=body, headers=headers)
        assert check_error(response, 413)["code"] == "request_too_large"


class Silent:
    """A model that never says anything."""

    def is_ready(self) -> bool:
        return False

    async def generate(self, request):
        await asyncio.Event().wait()
        yield []


class Broken:
    """A model that is lost, before its first token or after it."""

    def __init__(self, backend, after: int, error: Exception) -> None:
        self._backend, self._after, self._error = backend, after, error

    def is_ready(self) -> bool:
        return True

    async def generate(self, request):
        count = 0
        async with aclosing(self._backend.generate(request)) as batches:
            async for batch in batches:
                if count == self._after:
                    raise self._error
                count += 1
                yield batch


@pytest.mark.parametrize("stream", [False, True])
def test_no_token_in_time_is_503_with_retry_after(tiny_model, stream):
    app = make_app(Silent(), tiny_model, Limits(first_token_timeout_s=0.05, retry_after_s=7))
    response = send(app, "POST", CHAT, json=GOOD | {"stream": stream})
    check_error(response, 503)
    assert response.headers["retry-after"] == "7"
    assert send(app, "GET", "/health").status_code == 503


def test_too_slow_an_answer_is_504_or_an_error_in_its_stream(backend, tiny_model):
    app = make_app(backend, tiny_model, Limits(request_timeout_s=0.1))
    body = LONG | {"speculation": {"method": "vanilla"}}

    async def steps():
        async with http_client(app) as client:
            answers = [await client.post(CHAT, json=b) for b in (body, body | {"stream": True})]
        await idle(backend)
        return answers

    whole, streamed = run(steps())
    check_error(whole, 504)
    if streamed.status_code == 200:
        last = streamed.text.strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    else:
        check_error(streamed, 504)


def test_a_full_queue_is_429_with_retry_after(backend, tiny_model):
    app = make_app(Broken(backend, 0, overloaded("tiny", 3)), tiny_model)
    response = send(app, "POST", CHAT, json=GOOD)
    assert check_error(response, 429)["type"] == "rate_limit_error"
    assert response.headers["retry-after"] == "3"


@pytest.mark.parametrize("error", [ApiError(503, "The model is gone."), ValueError("secret detail")])
def test_a_model_lost_in_mid_stream_ends_the_stream_with_an_error(backend, tiny_model, error):
    app = make_app(Broken(backend, 2, error), tiny_model)
    response = send(app, "POST", CHAT, json=LONG | {"stream": True})
    assert response.status_code == 200
    last = response.text.strip().split("\n\n")[-1]
    assert set(json.loads(last.removeprefix("data: "))["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in response.text


def test_an_unexpected_failure_is_a_500_without_details(backend, tiny_model):
    app = make_app(Broken(backend, 0, ValueError("secret detail")), tiny_model)
    response = send(app, "POST", TEXT, json={"model": "tiny", "prompt": "a"})
    check_error(response, 500)
    assert "secret" not in response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_a_client_that_leaves_frees_its_slots(app, backend, stream, n):
    async def steps():
        received: asyncio.Queue = asyncio.Queue()

        async def receive():
            return await incoming.get()

        incoming: asyncio.Queue = asyncio.Queue()
        body = json.dumps(LONG | {"stream": stream, "n": n}).encode()
        incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        request = asyncio.create_task(app(_scope(), receive, received.put))
        while backend.engine.engine.load[0] < n:
            await asyncio.sleep(0.001)
        request.cancel()  # what Serve does when the client disconnects
        await asyncio.gather(request, return_exceptions=True)
        await idle(backend)

    run(steps())


def test_a_client_that_leaves_is_no_failure_of_the_server(app, backend, caplog):
    """Serve may report it by an exception instead of a message."""
    body = json.dumps(LONG | {"stream": True}).encode()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive():
        for message in messages:
            return message
        while not backend.engine.engine.load[0]:
            await asyncio.sleep(0.001)
        raise TaskCancelledError

    async def send(message):
        pass

    async def steps():
        await app(_scope(), receive, send)
        await idle(backend)

    run(steps())
    assert "failed" not in caplog.text


def _scope():
    return {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "raw_path": CHAT.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("app", 80),
        "client": ("test", 1),
        "root_path": "",
        "asgi": {"version": "3.0"},
    }


def test_an_engine_that_stops_ends_its_streams(tiny_loaded, tiny_model):
    backend = LocalBackend(Engine(tiny_loaded, EngineConfig(kv_cache_gib=0.01)))
    app = make_app(backend, tiny_model)
    backend.engine.close()
    with pytest.raises(EngineStopped):
        run(_drain(backend.engine))
    check_error(send(app, "POST", CHAT, json=GOOD), 500)


async def _drain(engine: AsyncEngine):
    async for _ in engine.stream(Request([5, 6])):
        pass
