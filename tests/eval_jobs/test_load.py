"""``load`` against a server of OpenAI's protocol that answers, fails or hangs as its URL says."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import eval_jobs.__main__ as command
from eval_jobs.load import at_concurrency, at_rate
from eval_jobs.load_client import LoadClient, Outcome
from eval_jobs.load_summary import format_table, percentiles, summarize

USAGE = {"prompt_tokens": 9, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}


def event(value: object) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\r\n\r\n"


def piece(text: str | None, ending: str | None = None) -> str:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": ending}]})


WHOLE = [piece(""), ": a comment\n\n", piece("one "), piece("two ü\x85\u2028"), piece(None, "stop")]
STREAMS = {
    "whole": [*WHOLE, event({"choices": [], "usage": USAGE}), "data: [DONE]\n\n"],
    "uncounted": [*WHOLE, "data: [DONE]\n\n"],
    "cut": WHOLE[:-1],
    "failing": [*WHOLE[:-1], event({"error": {"message": "it broke"}})],
    "babbling": ["data: {nope\n\n"],
    "foreign": [event({"choices": [5]})],
}


class Handler(BaseHTTPRequestHandler):
    """Answers ``POST /{kind}/chat/completions``."""

    bodies: list[dict[str, Any]]
    keys: list[str | None]
    together: threading.Barrier
    released: threading.Event

    def do_POST(self) -> None:
        kind = self.path.split("/")[1]
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.keys.append(self.headers["authorization"])
        if kind == "hanging":
            self.released.wait(30)
        elif kind == "full":
            self._send(429, json.dumps({"error": {"message": "later"}}))
        elif kind == "page":
            self._send(502, "<html>bad\ngateway</html>")
        else:
            if kind == "together":
                self.together.wait(10)
            self._send(200, "".join(STREAMS["whole" if kind == "together" else kind]))

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def handler():
    class Fresh(Handler):
        bodies, keys, together, released = [], [], threading.Barrier(3), threading.Event()

    return Fresh


@pytest.fixture
def url(handler):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    handler.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


def ask(url: str, timeout: float = 20.0) -> Outcome:
    async def steps() -> Outcome:
        async with LoadClient(url, timeout, None, {"model": "m"}) as client:
            return await client.ask("hello")

    return asyncio.run(steps())


def test_a_whole_answer(url, handler):
    outcome = ask(url + "/whole")
    assert (outcome.error, outcome.text) == (None, "one two ü\x85\u2028")
    assert (outcome.tokens, outcome.prompt_tokens, outcome.cached_tokens) == (7, 9, 4)
    assert outcome.ttft is not None and 0 < outcome.ttft <= outcome.seconds
    assert len(outcome.gaps) == 1
    (body,) = handler.bodies
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert (body["model"], body["stream"]) == ("m", True)


def test_pieces_are_counted_where_the_endpoint_counts_no_tokens(url):
    assert ask(url + "/uncounted").tokens == 2


@pytest.mark.parametrize(
    ("kind", "error", "detail"),
    [
        ("full", "http 429", "later"),
        ("page", "http 502", "<html>bad gateway</html>"),
        ("failing", "stream error", "it broke"),
        ("cut", "cut off", "ended"),
        ("babbling", "not an event", "{nope"),
        ("foreign", "not an event", "int"),
        ("hanging", "timeout", "0.3 s"),
    ],
)
def test_failures_are_told_apart(url, kind, error, detail):
    outcome = ask(f"{url}/{kind}", timeout=0.3 if kind == "hanging" else 20)
    assert outcome.error == error
    assert detail in outcome.detail


def test_as_many_requests_at_once_as_asked_for(url, handler):
    async def steps() -> list[Outcome]:
        async with LoadClient(url + "/together", 20, None, {}) as client:  # each waits for two others
            return await at_concurrency(client, [str(i) for i in range(9)], 3)

    outcomes = asyncio.run(steps())
    assert [o.error for o in outcomes] == [None] * 9
    assert sorted(body["messages"][0]["content"] for body in handler.bodies) == [str(i) for i in range(9)]


def test_requests_at_a_rate_do_not_wait_for_answers(url):
    async def steps() -> list[Outcome]:
        async with LoadClient(url + "/together", 20, None, {}) as client:
            return await at_rate(client, ["a", "b", "c"], 1000.0)

    outcomes = asyncio.run(steps())
    assert [o.error for o in outcomes] == [None] * 3
    assert outcomes[0].began <= outcomes[1].began <= outcomes[2].began


def test_figures_of_a_level():
    good = Outcome(began=1.0, seconds=3.0, ttft=0.5, gaps=[0.5, 1.5], tokens=5, prompt_tokens=8, cached_tokens=2)
    short = Outcome(began=0.0, seconds=0.25, ttft=0.25, tokens=1, prompt_tokens=8)
    bad = Outcome(began=0.0, seconds=1.0, ttft=0.1, gaps=[9.0], tokens=3, error="cut off")
    level = summarize([good, short, bad, bad])
    assert (level["requests"], level["answered"], level["errors"]) == (4, 2, {"cut off": 2})
    assert (level["seconds"], level["tokens"], level["tokens_per_s"]) == (4.0, 6, 1.5)
    assert (level["prompt_tokens"], level["cached_prompt_tokens"]) == (16, 2)
    assert level["ttft_s"]["p50"] == 0.375
    assert level["itl_s"]["p50"] == 1.0
    assert level["tpot_s"] == {"p50": 0.5, "p95": 0.5, "p99": 0.5}
    table = format_table([{"concurrency": 2, "rate": None, **level}, {"concurrency": None, "rate": 0.5, **level}])
    assert "2/4" in table and "0.5/s" in table and "2 cut off" in table


def test_a_level_without_answers_has_no_times():
    level = summarize([Outcome(error="timeout", seconds=2.0)])
    assert (level["answered"], level["ttft_s"], level["tokens_per_s"]) == (0, None, 0.0)
    assert "1 timeout" in format_table([{"concurrency": 1, "rate": None, **level}])
    assert percentiles([]) is None


@pytest.fixture
def bench(tmp_path) -> str:
    path = tmp_path / "bench.jsonl"
    path.write_text("".join(json.dumps({"question_id": i, "turns": [f"prompt {i}"]}) + "\n" for i in range(3)))
    return str(path)


def test_the_command(url, handler, bench, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "secret")
    arguments = ["load", "--base-url", url + "/whole", "--model", "m", "--bench", bench, "--concurrency", "1,2"]
    arguments += ["--requests", "5", "--max-tokens", "6", "--api-key-env", "SOME_KEY", "--extra-body", '{"seed": 3}']
    assert command.main([*arguments, "--json", "--out", str(tmp_path / "run")]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(level["concurrency"], level["answered"]) for level in result["levels"]] == [(1, 5), (2, 5)]
    assert json.loads((tmp_path / "run" / "load.json").read_text()) == result
    rows = [json.loads(line) for line in (tmp_path / "run" / "load.jsonl").read_text().splitlines()]
    assert [row["concurrency"] for row in rows] == [1] * 5 + [2] * 5
    assert len(handler.bodies) == 11  # one of them only to see whether it works
    assert all((body["seed"], body["temperature"]) == (3, 0) for body in handler.bodies)
    assert handler.bodies[-1]["max_tokens"] == 6
    assert set(handler.keys) == {"Bearer secret"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--base-url", "http://127.0.0.1:9/v1"], "connection"),
        (["--base-url", "not a url"], "connection"),
        (["--api-key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"),
        (["--bench", "missing.jsonl"], "missing.jsonl"),
        (["--concurrency", "1,0"], "not between"),
        (["--concurrency", "x"], "--concurrency"),
        (["--rate", "-1"], "not between"),
        (["--rate", "nan"], "not between"),
        (["--rate", "1", "--concurrency", "1"], "not allowed"),
        (["--requests", "0"], "--requests"),
        (["--extra-body", "[]"], "object"),
    ],
)
def test_mistakes_are_told_in_a_line(url, bench, capsys, arguments, says):
    whole = ["load", "--base-url", url + "/whole", "--model", "m", "--bench", bench, *arguments]
    try:
        code = command.main(whole)
    except SystemExit as exit_:  # argparse's own way
        code = int(exit_.code or 0)
    captured = capsys.readouterr()
    assert code == 2
    assert says in captured.err and "Traceback" not in captured.err
