"""The real ``openai`` client against a deployed application of two models."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.serve_app.deployment import deploy, deployed, metric, wait_until

HELLO = [{"role": "user", "content": "hello there, hello there"}]


@pytest.fixture(scope="module")
def arguments(tiny_model):
    return {
        "model": str(tiny_model),
        "dtype": "float32",
        "device": "cpu",
        "kv_cache_gib": 0.02,
        "max_sequences": 2,
        "max_queued_requests": 2,
        "models": [{"name": "tiny"}, {"name": "plain", "method": "vanilla", "max_queued_requests": 64}],
    }


@pytest.fixture(scope="module")
def url(arguments):
    with deployed(**arguments) as address:
        yield address


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def chat(client, **fields):
    arguments = {"model": "tiny", "messages": HELLO, "max_tokens": 20, "temperature": 0} | fields
    return client.chat.completions.create(**arguments)


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["tiny", "plain"]
    assert client.models.retrieve("plain").id == "plain"


def test_chat_and_its_stream_agree(client):
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 20


def test_methods_agree_whatever_runs_beside_them(client):
    expected = chat(client, model="plain", temperature=1, seed=9, max_tokens=60).choices[0].message.content
    texts: list[str] = []

    def ask(method: str, seed: int) -> None:
        extra = {"speculation": {"method": method}}
        answer = chat(client, model="plain", temperature=1, seed=seed, max_tokens=60, extra_body=extra)
        if seed == 9:
            texts.append(answer.choices[0].message.content)

    jobs = [(m, 9) for m in ("vanilla", "pld", "logitspec")] + [("logitspec", seed) for seed in range(20, 30)]
    threads = [threading.Thread(target=ask, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [expected] * 3


def test_n_seed_stop_and_logprobs(client):
    many = chat(client, n=3, temperature=1, seed=1, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in many.choices}) == 3
    assert all(len(row.top_logprobs) == 2 for choice in many.choices for row in choice.logprobs.content)
    again = chat(client, n=3, temperature=1, seed=1)
    assert [c.message.content for c in many.choices] == [c.message.content for c in again.choices]
    text = chat(client, max_tokens=40).choices[0].message.content
    stopped = chat(client, max_tokens=40, stop=[text[8:10]]).choices[0]
    assert stopped.finish_reason == "stop"
    assert text.startswith(stopped.message.content)


def test_completions(client):
    arguments = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(prompt=["abc", "xyz"], echo=True, **arguments)
    assert [choice.text[:3] for choice in whole.choices] == ["abc", "xyz"]
    stream = client.completions.create(prompt="abc", stream=True, **arguments)
    assert "abc" + "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    ids = client.completions.create(prompt=[67, 68, 69], **arguments)
    assert "abc" + ids.choices[0].text == whole.choices[0].text
    scored = client.completions.create(model="tiny", prompt="abc", max_tokens=4, logprobs=2)
    assert len(scored.choices[0].logprobs.tokens) == 4


def test_errors_are_the_clients_own_exceptions(client, url):
    with pytest.raises(openai.NotFoundError) as missing:
        chat(client, model="none")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        chat(client, temperature=3)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        chat(client, messages=[{"role": "user", "content": "x" * 900}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        chat(client, messages=[{"role": "user", "content": "x" * 900}], stream=True)
    for method, path in (("GET", "/v1/none"), ("GET", "/v1/chat/completions"), ("PUT", "/")):
        response = httpx.request(method, url + path)
        assert response.status_code in (404, 405)
        assert response.json()["error"]["message"]


def test_a_large_body_is_413(url):
    body = b'{"user": "' + b"x" * 10_000_000 + b'"}'
    response = httpx.post(f"{url}/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"


def test_request_ids_are_returned(url):
    assert httpx.get(f"{url}/version").headers["x-request-id"]
    assert httpx.get(f"{url}/version", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"


def running(model: str) -> float:
    return metric("ray_logitspec_running", model=model) + metric("ray_logitspec_waiting", model=model)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(client, url, stream):
    body = {"model": "plain", "messages": HELLO, "ignore_eos": True, "n": 100, "stream": stream}
    aborted = metric("ray_logitspec_requests", model="plain", finish_reason="abort")
    with httpx.Client() as http:
        try:
            with http.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=1.0) as response:
                for _ in response.iter_lines():
                    break
        except httpx.ReadTimeout:
            assert not stream
    wait_until(lambda: metric("ray_logitspec_requests", model="plain", finish_reason="abort") >= aborted + 50)
    wait_until(lambda: running("plain") == 0)
    assert chat(client, model="plain").choices[0].message.content


def test_a_full_queue_is_429_and_the_rest_is_answered(url):
    statuses: list[int] = []
    headers: list[str | None] = []

    def ask() -> None:
        body = {"model": "tiny", "messages": HELLO, "ignore_eos": True, "max_tokens": 300}
        response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=100)
        statuses.append(response.status_code)
        if response.status_code == 429:
            headers.append(response.headers.get("retry-after"))
            assert response.json()["error"]["type"] == "rate_limit_error"

    threads = [threading.Thread(target=ask) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) == {200, 429}
    assert set(headers) == {"1"}


def replica_process(deployment: str) -> psutil.Process:
    """The process of a deployment's only replica."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile, or a zombie
            if process.is_running() and f"ServeReplica:default:{deployment}" in " ".join(process.cmdline()):
                found.append(process)
    (replica,) = found
    return replica


def test_a_killed_replica_gives_clean_errors_and_comes_back(client):
    stream = chat(client, max_tokens=400, stream=True, extra_body={"ignore_eos": True})
    next(stream)
    waiting: list[Any] = []

    def ask() -> None:
        try:
            chat(client, max_tokens=400, extra_body={"ignore_eos": True})
        except openai.APIError as error:
            waiting.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.2)
    replica_process("TargetModel-tiny").kill()
    with pytest.raises(openai.APIError) as lost:
        list(stream)
    thread.join()
    assert "unavailable" in str(lost.value)
    assert [type(error) for error in waiting] == [openai.InternalServerError]
    assert waiting[0].status_code == 503
    assert "Traceback" not in str(waiting[0]) + str(lost.value)
    assert chat(client).choices[0].message.content  # waits for the new replica
    assert chat(client, model="plain").choices[0].message.content


def test_a_rolling_update_loses_no_request(client, url, arguments):
    expected = chat(client, model="plain", max_tokens=60).choices[0].message.content
    outcomes: list[str] = []
    stop = threading.Event()

    def text(stream: bool) -> str:
        answer = chat(client, model="plain", max_tokens=60, stream=stream)
        if not stream:
            return answer.choices[0].message.content
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer)

    def ask(stream: bool) -> None:
        while not stop.is_set():
            try:
                outcomes.append(text(stream))
            except openai.APIError as error:
                outcomes.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, True, False)]
    for thread in threads:
        thread.start()
    try:
        before = replica_process("TargetModel-plain").pid
        deploy(**arguments, capacity=8)
        after = replica_process("TargetModel-plain").pid
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert before != after
    assert len(outcomes) > 10
    assert set(outcomes) == {expected}
