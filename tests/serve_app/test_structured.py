"""Answers in a given form, predicted answers, and scored prompts: with speculation as without."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from cluster.models import load_tokenizer
from serve_app.openai_api.app import create_app
from serve_app.openai_api.served_model import ServedModel
from serve_app.settings import Limits, ModelSettings
from tests.serve_app.conftest import http_client, run
from tests.serve_app.test_endpoints import CHAT, LETTER_A, TEXT, chat_body, events, text_body
from tests.serve_app.test_errors import check_error
from tests.serve_app.test_tools import TEMPLATE
from tests.tiny import METHODS_ALONE

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["colour", "size", "tags"],
    "additionalProperties": False,
}


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_schema_is_followed_and_the_method_does_not_matter(post, temperature):
    texts = set()
    for method in METHODS_ALONE:
        body = chat_body(
            max_tokens=150,
            temperature=temperature,
            seed=4,
            response_format=schema_format(SCHEMA),
            speculation={"method": method},
        )
        response = post(CHAT, body)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        assert choice["finish_reason"] == "stop"
        texts.add(choice["message"]["content"])
        usage = response.json()["usage"]
    value = json.loads(texts.pop())
    assert not texts
    assert value["colour"] in ("red", "green")
    assert 0 <= value["size"] <= 99
    assert usage["speculation"]["accepted"]["grammar"] > 5
    assert usage["speculation"]["decode_steps"] < 0.75 * usage["completion_tokens"]


def test_every_answer_of_a_stream_follows_its_schema(post):
    body = chat_body(max_tokens=150, temperature=1, seed=2, n=3, stream=True, response_format=schema_format(SCHEMA))
    texts = {0: "", 1: "", 2: ""}
    for chunk in events(post(CHAT, body)):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert all(set(json.loads(text)) == {"colour", "size", "tags"} for text in texts.values())


def test_a_json_object_is_an_object(post):
    choice = post(CHAT, chat_body(max_tokens=60, response_format={"type": "json_object"})).json()["choices"][0]
    assert choice["message"]["content"].startswith("{")
    assert post(CHAT, chat_body(response_format={"type": "text"})).status_code == 200


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nothing"},
        {"$ref": "#/none"},
        {"$ref": "#"},
        {"type": "string", "pattern": "("},
        {"type": "string", "format": "odd"},
        {"type": "integer", "minimum": 5, "maximum": 4},
        {"const": "x" * 200_000},
    ],
    ids=range(7),
)
def test_a_bad_schema_is_named(post, schema):
    error = check_error(post(CHAT, chat_body(response_format=schema_format(schema))), 400)
    assert error["param"] == "response_format"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "minItems": 10**7},
        {"type": "string", "minLength": 10**9},
        {"type": "string", "pattern": "(a{1000}){1000}"},
        {"anyOf": [{"const": f"{i}" * 50} for i in range(2000)]},
        {"type": "integer", "minimum": -(10**30), "maximum": 10**30},
    ],
    ids=range(5),
)
def test_a_huge_schema_is_refused_or_served(post, schema):
    response = post(CHAT, chat_body(max_tokens=5, response_format=schema_format(schema)))
    assert response.status_code in (200, 400), response.text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "paint"}}])
def test_a_required_call_is_made(backend, tiny_model, choice):
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = TEMPLATE
    app = create_app([ServedModel(ModelSettings(name="tiny"), tokenizer, backend)], Limits(), frozenset())
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}},
        "required": ["colour"],
    }
    parameters["additionalProperties"] = False
    tools = [{"type": "function", "function": {"name": "paint", "parameters": parameters}}]

    async def ask():
        async with http_client(app) as client:
            return await client.post(CHAT, json=chat_body(max_tokens=150, tools=tools, tool_choice=choice))

    response = run(ask())
    assert response.status_code == 200, response.text
    (answer,) = response.json()["choices"]
    assert answer["finish_reason"] == "tool_calls"
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "paint"
    assert json.loads(call["function"]["arguments"])["colour"] in ("red", "green")


def test_a_prediction_saves_steps_and_changes_nothing(post):
    whole_trees = {"method": "logitspec", "capacity": 64}  # whatever the time they take
    body = chat_body(max_tokens=120, logit_bias={"0": -100, "1": -100, "2": -100}, speculation=whole_trees)
    plain = post(CHAT, body).json()
    text = plain["choices"][0]["message"]["content"]
    prediction = {"type": "content", "content": "hell" * 5}
    astray = post(CHAT, body | {"prediction": prediction}).json()
    assert astray["choices"][0]["message"]["content"] == text
    details = astray["usage"]["completion_tokens_details"]
    assert details["rejected_prediction_tokens"] > 0
    biased = chat_body(max_tokens=100, logit_bias={str(LETTER_A): 100}, speculation=whole_trees)
    told = post(CHAT, biased | {"prediction": {"type": "content", "content": [{"type": "text", "text": "a" * 100}]}})
    details = told.json()["usage"]["completion_tokens_details"]
    assert told.json()["choices"][0]["message"]["content"] == "a" * 100
    assert details["accepted_prediction_tokens"] > 90
    assert told.json()["usage"]["speculation"]["decode_steps"] <= 4


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_an_echoed_prompt_is_scored_as_the_model_scores_it(post, tiny_loaded, max_tokens):
    ids = tiny_loaded.tokenizer("hello there, the hell").input_ids
    body = post(TEXT, text_body(prompt=ids, echo=True, logprobs=1, max_tokens=max_tokens)).json()
    (choice,) = body["choices"]
    logprobs = choice["logprobs"]
    with torch.inference_mode():
        scores = tiny_loaded.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert len(logprobs["tokens"]) == len(ids) + max_tokens
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    for at in range(1, len(ids)):
        assert logprobs["token_logprobs"][at] == pytest.approx(float(scores[at - 1, ids[at]]), abs=1e-4)
        top = logprobs["top_logprobs"][at]
        assert max(top.values()) == pytest.approx(float(scores[at - 1].max()), abs=1e-4)
    assert "".join(logprobs["tokens"][: len(ids)]) == "hello there, the hell"
    assert choice["text"].startswith("hello there, the hell")
    offsets = logprobs["text_offset"]
    assert offsets[1] == len(logprobs["tokens"][0])
    if max_tokens == 0:
        assert choice["text"] == "hello there, the hell"


def test_scores_are_streamed_too(post):
    fields = text_body(prompt="hello there", echo=True, logprobs=1, max_tokens=6)
    whole = post(TEXT, fields).json()["choices"][0]
    chunks = [chunk["choices"][0] for chunk in events(post(TEXT, fields | {"stream": True}))]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [value for chunk in chunks for value in chunk["logprobs"][name]] == values
