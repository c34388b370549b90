"""Chat and text completions over a real engine, without Serve between."""

from __future__ import annotations

import json

import pytest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "hello there, hello there"}]
LETTER_A = 3 + 64  # id of "a": special tokens, then the byte characters in order


def chat_body(**fields):
    return {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 0} | fields


def text_body(**fields):
    return {"model": "tiny", "prompt": "hello there", "max_tokens": 12, "temperature": 0} | fields


def events(response):
    """The data of all events; the stream must end as OpenAI's do."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_chat_completion_has_openais_shape(post):
    response = post(CHAT, chat_body())
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    usage = body["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    assert usage["speculation"]["decode_steps"] >= 1


@pytest.mark.parametrize("method", ["vanilla", "pld", "logitspec"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_the_method_does_not_change_the_text(post, method, temperature):
    texts = set()
    for chosen in ("vanilla", method):
        body = chat_body(temperature=temperature, seed=5, max_tokens=40, speculation={"method": chosen, "capacity": 8})
        response = post(CHAT, body).json()
        texts.add(response["choices"][0]["message"]["content"])
    assert len(texts) == 1


def test_a_stream_adds_up_to_the_whole_answer(post):
    body = chat_body(max_tokens=40)
    whole = post(CHAT, body).json()
    chunks = events(post(CHAT, body | {"stream": True, "stream_options": {"include_usage": True}}))
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    reasons = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 40
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_text_completion_streams_what_it_returns_whole(post):
    body = text_body(max_tokens=30)
    whole = post(TEXT, body).json()
    chunks = events(post(TEXT, body | {"stream": True}))
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole["choices"][0]["text"]
    assert all("usage" not in chunk for chunk in chunks)


def test_n_answers_differ_and_the_first_is_the_only_ones(post):
    many = post(CHAT, chat_body(n=3, temperature=1, seed=11, max_tokens=30)).json()
    one = post(CHAT, chat_body(temperature=1, seed=11, max_tokens=30)).json()
    texts = [choice["message"]["content"] for choice in many["choices"]]
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2]
    assert texts[0] == one["choices"][0]["message"]["content"]
    assert len(set(texts)) == 3
    assert many["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert many["usage"]["completion_tokens"] > one["usage"]["completion_tokens"]


def test_a_seed_fixes_the_answer_and_none_does_not(post):
    def text(**fields):
        body = chat_body(temperature=1.5, max_tokens=30, **fields)
        return post(CHAT, body).json()["choices"][0]["message"]["content"]

    assert text(seed=3) == text(seed=3)
    assert text(seed=3) != text(seed=4)
    assert text() != text()


def test_a_stop_string_ends_the_text_before_it(post):
    text = post(TEXT, text_body(max_tokens=40)).json()["choices"][0]["text"]
    stop = text[10:12]
    choice = post(TEXT, text_body(max_tokens=40, stop=stop)).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == text[: text.index(stop)]


def test_several_prompts_are_answered_in_order(post):
    prompts = ["hello", "there", "hello there"]
    body = post(TEXT, text_body(prompt=prompts, n=2)).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    for i, prompt in enumerate(prompts):
        alone = post(TEXT, text_body(prompt=prompt)).json()["choices"][0]["text"]
        assert body["choices"][2 * i]["text"] == alone
        assert body["choices"][2 * i + 1]["text"] == alone  # greedy: all answers agree


def test_token_prompts_equal_their_text(post):
    text = post(TEXT, text_body(prompt="abc", echo=True)).json()["choices"][0]["text"]
    ids = [LETTER_A + at for at in range(3)]
    assert post(TEXT, text_body(prompt=ids, echo=True)).json()["choices"][0]["text"] == text
    both = post(TEXT, text_body(prompt=[ids, ids])).json()
    assert ["abc" + choice["text"] for choice in both["choices"]] == [text, text]


def test_echo_repeats_the_prompt_once_in_a_stream(post):
    chunks = events(post(TEXT, text_body(prompt="abc", echo=True, stream=True)))
    whole = post(TEXT, text_body(prompt="abc", echo=True)).json()["choices"][0]["text"]
    assert whole.startswith("abc")
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole


def test_chat_logprobs_name_every_token_and_the_best(post):
    choice = post(CHAT, chat_body(logprobs=True, top_logprobs=3)).json()["choices"][0]
    rows = choice["logprobs"]["content"]
    assert len(rows) == 12
    said = b"".join(bytes(row["bytes"]) for row in rows)
    assert said.decode(errors="replace") == choice["message"]["content"]
    for row in rows:
        assert len(row["top_logprobs"]) == 3
        assert row["top_logprobs"][0]["token"] == row["token"]  # greedy takes the best
        assert row["logprob"] == row["top_logprobs"][0]["logprob"] <= 0


def test_text_logprobs_are_parallel_lists(post):
    choice = post(TEXT, text_body(logprobs=2)).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert {len(column) for column in logprobs.values()} == {12}
    for token, value, top in zip(*(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
        assert top[token] == value
    assert logprobs["text_offset"][0] == 0


def test_streamed_logprobs_are_those_of_the_whole_answer(post):
    for path, body in ((CHAT, chat_body(logprobs=True, top_logprobs=2)), (TEXT, text_body(logprobs=2))):
        whole = post(path, body).json()["choices"][0]["logprobs"]
        parts = [c["choices"][0]["logprobs"] for c in events(post(path, body | {"stream": True}))]
        key = "content" if path == CHAT else "text_offset"
        assert [row for part in parts if part for row in part[key]] == whole[key]


def test_bias_and_penalties_reach_the_engine(post):
    forced = post(TEXT, text_body(logit_bias={str(LETTER_A): 100})).json()["choices"][0]["text"]
    assert forced == "a" * 12
    varied = post(TEXT, text_body(logit_bias={str(LETTER_A): 20}, frequency_penalty=2, max_tokens=40))
    assert varied.json()["choices"][0]["text"] != "a" * 40


def test_min_tokens_and_stop_token_ids(post):
    bias = {"0": 100}
    ended = post(TEXT, text_body(logit_bias=bias)).json()["choices"][0]
    assert (ended["finish_reason"], ended["text"]) == ("stop", "")
    held = post(TEXT, text_body(logit_bias=bias, min_tokens=4)).json()
    assert held["usage"]["completion_tokens"] == 5
    stopped = post(TEXT, text_body(logit_bias={str(LETTER_A): 100}, stop_token_ids=[LETTER_A])).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"


def test_a_stop_token_has_no_logprobs(post):
    choice = post(CHAT, chat_body(logit_bias={"0": 100}, logprobs=True)).json()["choices"][0]
    assert choice["logprobs"]["content"] == []
    assert choice["message"]["content"] == ""


def test_without_a_bound_a_chat_answer_may_fill_the_context(post):
    body = chat_body(logit_bias={str(LETTER_A): 100})
    del body["max_tokens"]
    usage = post(CHAT, body).json()["usage"]
    assert usage["total_tokens"] == 512


def test_content_parts_are_joined(post):
    parts = [{"type": "text", "text": "hello there, "}, {"type": "text", "text": "hello there"}]
    a = post(CHAT, chat_body()).json()
    b = post(CHAT, chat_body(messages=[{"role": "user", "content": parts}])).json()
    assert a["choices"][0]["message"] == b["choices"][0]["message"]


def test_a_conversation_with_every_role_is_rendered(post):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "so?"},
    ]
    assert post(CHAT, chat_body(messages=messages)).status_code == 200


def test_the_final_message_can_be_continued(post):
    messages = [*HELLO, {"role": "assistant", "content": "the hell"}]
    continued = post(CHAT, chat_body(messages=messages, continue_final_message=True)).json()
    answered = post(CHAT, chat_body(messages=messages)).json()
    assert continued["usage"]["prompt_tokens"] < answered["usage"]["prompt_tokens"]


def test_a_second_turn_reuses_the_first(post):
    long = [{"role": "user", "content": "tell me about the moon " * 8}]
    first = post(CHAT, chat_body(messages=long)).json()
    answer = first["choices"][0]["message"]["content"]
    more = [*long, {"role": "assistant", "content": answer}, {"role": "user", "content": "more"}]
    second = post(CHAT, chat_body(messages=more)).json()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 16


def test_models_health_and_version(call):
    models = call("GET", "/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["tiny"]
    assert call("GET", "/v1/models/tiny").json() == models["data"][0]
    assert call("GET", "/health").json() == {"status": "ok", "models": {"tiny": True}}
    assert call("GET", "/version").json()["version"]
