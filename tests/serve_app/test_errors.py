"""Whatever is sent, the answer is an error in OpenAI's format or a good answer, never a 5xx."""

from __future__ import annotations

import json

import pytest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
GOOD = {"model": "tiny", "messages": HELLO, "max_tokens": 4}
GOOD_TEXT = {"model": "tiny", "prompt": "hello", "max_tokens": 4}


def check_error(response, status: int) -> dict:
    """The error object, after checking its form."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert "Traceback" not in response.text
    return body["error"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{}]}, "messages[0]"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, None),
        ({"messages": [{"role": "user", "content": "x", "extra": 1}]}, "messages[0].extra"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": 1e308}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "10"}, "max_tokens"),
        ({"max_tokens": 10_000}, "messages"),
        ({"max_completion_tokens": 4}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 100}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {"999999": 1}}, None),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stop_token_ids": [999999]}, None),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": 9}, None),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"speculation": {"method": "magic"}}, "speculation.method"),
        ({"speculation": {"capacity": 0}}, "speculation.capacity"),
        ({"speculation": {"capacity": 10**9}}, "speculation.capacity"),
        ({"speculation": {"speed": 9}}, "speculation.speed"),
        ({"functions": []}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x y"}}}, None),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": "text"}, "prediction"),
        ({"audio": {}}, "audio"),
        ({"unknown": 1}, "unknown"),
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenizer": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"padding": "max_length", "max_length": 10**9}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_a_bad_chat_field_is_named(post, fields, param):
    error = check_error(post(CHAT, GOOD | fields), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param or param is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, None),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, None),
        ({"prompt": [-1]}, None),
        ({"prompt": [2**40]}, None),
        ({"prompt": [300_000]}, None),
        ({"prompt": [300_000], "echo": True}, None),
        ({"prompt": [2**31 - 1], "echo": True}, None),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["x"] * 129}, "n"),
        ({"prompt": ["x"] * 100, "n": 2}, "n"),
        ({"prompt": "x" * 600}, "prompt"),
        ({"best_of": 4}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 511}, "prompt"),
        ({"messages": HELLO}, "messages"),
    ],
)
def test_a_bad_text_field_is_named(post, fields, param):
    error = check_error(post(TEXT, GOOD_TEXT | fields), 400)
    assert error["param"] == param or param is None


def test_a_missing_field_is_named(post):
    for path, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "x"})):
        error = check_error(post(path, body), 400)
        assert error["message"] == "Missing required parameter: 'model'."
    assert check_error(post(TEXT, {"model": "tiny"}), 400)["param"] == "prompt"


def test_too_long_a_prompt_has_openais_code(post):
    error = check_error(post(CHAT, GOOD | {"messages": [{"role": "user", "content": "x" * 600}]}), 400)
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"]


def test_streams_report_errors_with_a_status_while_they_can(post):
    body = GOOD | {"stream": True, "messages": [{"role": "user", "content": "x" * 600}]}
    check_error(post(CHAT, body), 400)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"5",
        b'"text"',
        b"\xff\xfe\x00",
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "tiny", "temperature": NaN, "messages": [{"role": "user", "content": "a"}]}',
        b'{"model": "tiny", "temperature": Infinity, "messages": [{"role": "user", "content": "a"}]}',
        b'{"model": "tiny", "temperature": 1e999, "messages": [{"role": "user", "content": "a"}]}',
        b'{"model": "tiny", "max_tokens": ' + b"9" * 10_000 + b', "prompt": "a"}',
        b"[" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"model": "tiny", "messages": ' + b"[" * 150 + b"]" * 150 + b"}",
        json.dumps({"model": "tiny", "prompt": "a", "x" * 100_000: 1}).encode(),
    ],
    ids=range(16),
)
def test_bodies_that_are_no_request(call, content):
    for path in (CHAT, TEXT):
        response = call("POST", path, content=content, headers={"content-type": "application/json"})
        error = check_error(response, 400)
        assert len(error["message"]) < 2000


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "nonsense", ""])
def test_other_content_types(call, kind):
    response = call("POST", CHAT, content=json.dumps(GOOD), headers={"content-type": kind})
    assert "application/json" in check_error(response, 400)["message"]


@pytest.mark.parametrize(
    "text",
    [
        "\x00\x01\x02",
        "\u202e\u200b",
        "😀" * 20,
        "\U0010ffff",
        "<|im_end|><|im_start|>",
        "{{ 7*7 }}",
        "\r\n\t",
    ],
)
def test_odd_characters_are_text_like_any_other(post, text):
    for path, body in (
        (CHAT, GOOD | {"messages": [{"role": "user", "content": text}]}),
        (TEXT, GOOD_TEXT | {"prompt": text}),
    ):
        response = post(path, body)
        assert response.status_code == 200, response.text
        json.dumps(response.json()).encode()
    echoed = post(TEXT, GOOD_TEXT | {"prompt": text, "echo": True}).json()["choices"][0]["text"]
    assert echoed.startswith(text)


def test_nothing_in_a_message_is_run_as_a_template(post):
    usage = [
        post(CHAT, GOOD | {"messages": [{"role": "user", "content": text}]}).json()["usage"]["prompt_tokens"]
        for text in ("{{ 7*7 }}", "[[ 7*7 ]]")
    ]
    assert usage[0] == usage[1]


def test_unknown_models_urls_and_methods(call, post):
    for path, body in ((CHAT, GOOD), (TEXT, GOOD_TEXT)):
        error = check_error(post(path, body | {"model": "gpt-none"}), 404)
        assert error["code"] == "model_not_found"
        assert error["param"] == "model"
        check_error(post(path, body | {"model": "x" * 100_000}), 404)
    check_error(call("GET", "/v1/models/none"), 404)
    check_error(call("GET", "/v1/models/../../etc/passwd"), 404)
    for path in ("/", "/v1", "/v1/embeddings", "/v1/chat/completions/", "/%00", "/v1/chat/completions/x"):
        check_error(call("POST", path, json={}), 404)
    response = call("GET", CHAT)
    check_error(response, 405)
    assert response.headers["allow"] == "POST"
    check_error(call("DELETE", "/v1/models"), 405)


def test_extremes_within_the_rules_are_served(post):
    for fields in (
        {"temperature": 1e-300},
        {"temperature": 2, "top_p": 0},
        {"temperature": 1, "top_k": 1},
        {"temperature": 1, "top_k": 10**6},
        {"temperature": 1, "min_p": 1.0},
        {"logit_bias": {"5": -100, "6": 100}},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"n": 4, "seed": 2**63 - 1, "temperature": 1},
        {"speculation": {"capacity": 256}},
        {"speculation": {"capacity": 1}},
        {"user": "u" * 1000, "metadata": {"a": "b"}, "store": False},
    ):
        response = post(CHAT, GOOD | fields)
        assert response.status_code == 200, (fields, response.text)
