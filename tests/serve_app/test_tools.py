"""Function calls: found in text however it is cut, given to the template, reported whole and in streams."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.models import load_tokenizer
from serve_app.generation import Ending, Piece, Started
from serve_app.openai_api.app import create_app
from serve_app.openai_api.served_model import ServedModel
from serve_app.openai_api.tools import ToolCallParser, ToolFormat, tool_format
from serve_app.settings import Limits, ModelSettings
from tests.serve_app.conftest import http_client, run
from tests.serve_app.test_endpoints import CHAT, events

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
OTHER = '<tool_call>{"name": "time", "arguments": "{}"}</tool_call>'
PLAIN_CALL = '{"name": "weather", "parameters": {"city": "Köln"}}'
TEMPLATE = (
    "{% if tools %}Write calls as <tool_call>.{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments.city }}{% endfor %}\n{% endfor %}"
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("weather", "time")
]


def parse(form: ToolFormat, pieces: list[str], *, parallel: bool = True):
    parser = ToolCallParser(form, {"weather", "time"}, parallel=parallel)
    content = "".join(parser.feed(piece) for piece in pieces)
    rest, calls = parser.finish()
    return content + rest, [(call.function.name, call.function.arguments) for call in calls]


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (ToolFormat.TAGS, "just text", "just text", []),
        (ToolFormat.TAGS, "a < b <tool", "a < b <tool", []),
        (ToolFormat.TAGS, f"Let me see. {CALL}", "Let me see. ", [("weather", '{"city": "Köln"}')]),
        (ToolFormat.TAGS, f"{CALL}\n{OTHER}", "", [("weather", '{"city": "Köln"}'), ("time", "{}")]),
        (ToolFormat.TAGS, "<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
        (ToolFormat.TAGS, '<tool_call>{"name": "rm"}</tool_call>', '<tool_call>{"name": "rm"}</tool_call>', []),
        (ToolFormat.TAGS, '<tool_call>{"name": "time"}', "", [("time", "{}")]),
        (ToolFormat.JSON, PLAIN_CALL, "", [("weather", '{"city": "Köln"}')]),
        (ToolFormat.JSON, f"[{PLAIN_CALL}]", "", [("weather", '{"city": "Köln"}')]),
        (ToolFormat.JSON, '{"a": 1}', '{"a": 1}', []),
        (ToolFormat.JSON, 'x {"name": "time"}', 'x {"name": "time"}', []),
        (ToolFormat.JSON, "[" * 100_000, "[" * 100_000, []),
        (ToolFormat.JSON, "", "", []),
    ],
    ids=range(13),
)
def test_calls_are_found(form, text, content, calls):
    assert parse(form, [text]) == (content, calls)


@given(st.data())
def test_how_the_text_is_cut_does_not_matter(data):
    form = data.draw(st.sampled_from(list(ToolFormat)))
    parts = ["hi ", CALL, OTHER, PLAIN_CALL, "<", "<tool_call>", "[", " "]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=5)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(form, pieces) == parse(form, [text])


def test_without_parallel_calls_only_the_first_counts():
    assert len(parse(ToolFormat.TAGS, [CALL + OTHER], parallel=False)[1]) == 1


def test_the_form_is_read_off_the_template():
    assert tool_format("{{ tools }} <tool_call>") is ToolFormat.TAGS
    assert tool_format("{{ tools }} [TOOL_CALLS]") is ToolFormat.JSON
    assert tool_format("{{ tools }}") is None
    assert tool_format("<tool_call>") is None


class Says:
    """A model that says a given text, a few characters at a time."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.asked = None

    def is_ready(self) -> bool:
        return True

    async def generate(self, request):
        self.asked = request
        ending = Ending("stop", len(request.prompts[0]), 0, 9, 3, 8, 0, {}, {})
        if not request.stream:
            yield [Started()]
            yield [Piece(0, self.text, None, ending)]
            return
        for at in range(0, len(self.text), 3):
            yield [Piece(0, self.text[at : at + 3])]
        yield [Piece(0, "", None, ending)]


@pytest.fixture
def say(tiny_model):
    """Post a chat request to a model that says ``text``; its template has tools."""

    def send(text: str, **fields):
        backend = Says(text)
        tokenizer = load_tokenizer(str(tiny_model))
        tokenizer.chat_template = TEMPLATE
        app = create_app([ServedModel(ModelSettings(name="tiny"), tokenizer, backend)], Limits(), frozenset())
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS} | fields

        async def post():
            async with http_client(app) as client:
                return await client.post(CHAT, json=body)

        response = run(post())
        prompt = tokenizer.decode(backend.asked.prompts[0]) if backend.asked else None
        return response, prompt

    return send


def test_a_call_is_reported_whole(say):
    response, prompt = say(f"Let me see. {CALL}")
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}
    assert '"weather"' in prompt


def test_a_call_is_streamed_after_the_content(say):
    response, _ = say(f"Let me see. {CALL}", stream=True)
    deltas = [chunk["choices"][0] for chunk in events(response)]
    assert "".join(d["delta"].get("content") or "" for d in deltas) == "Let me see. "
    assert deltas[-1]["finish_reason"] == "tool_calls"
    assert [call["index"] for d in deltas for call in d["delta"].get("tool_calls", [])] == [0]


def test_no_call_is_plain_text(say):
    response, _ = say("It rains.")
    choice = response.json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "It rains.", "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_tool_choice_none_hides_the_tools(say):
    response, prompt = say(CALL, tool_choice="none")
    assert "weather" not in prompt
    assert response.json()["choices"][0]["message"]["content"] == CALL


def test_earlier_calls_reach_the_template_as_objects(say):
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "c"},
    ]
    _, prompt = say("ok", messages=messages)
    assert "Bonn" in prompt


def test_tools_without_a_template_for_them_are_refused(post):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    response = post(CHAT, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
