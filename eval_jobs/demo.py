"""``make demo``: a corpus is built, the model is served, prompts are asked over HTTP, and methods are compared.

Every part is a command that is shown before it runs. All of it is gone afterwards, Ctrl-C included: Ray runs privately,
on ports of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any

import httpx

from cluster.cli.options import add_model_options
from cluster.prompts import read_prompts
from eval_jobs.events import EventReader

_BOLD, _GREEN, _DIM, _PLAIN = "\033[1m", "\033[32m", "\033[2m", "\033[0m"
_READY_WITHIN_S = 180.0
_ENDED_WITHIN_S = 20.0
_PYTHON = Path(sys.executable)


def add_parser(subcommands: Any) -> None:
    """Declare the command and its options."""
    parser = subcommands.add_parser("demo", help="see it work", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Build, serve, ask, compare.

    Raises:
        ChildProcessError: one of the commands failed; its output says why.
    """
    for stop in (signal.SIGINT, signal.SIGTERM):  # the former may be ignored, as in a shell's background
        signal.signal(stop, signal.default_int_handler)
    data = resources.files("eval_jobs") / "data"
    model = ["--model", args.model, "--dtype", args.dtype, "--device", args.device]
    with (
        tempfile.TemporaryDirectory(prefix="logitspec-demo-") as directory,
        resources.as_file(data / "demo.jsonl") as bench,
        resources.as_file(data / "demo_corpus.jsonl") as texts,
    ):
        folder = Path(directory)
        corpus = folder / "corpus"
        _title("A reference corpus, from a few texts about what will be asked")
        _finish("corpus_builder", "build", "--input", texts, "--tokenizer", args.model, "--out", corpus)
        _title("The model, served to OpenAI clients")
        with _served(args, corpus, folder) as url:
            _title(f"Prompts over HTTP; {_colour('accepted draft tokens', _GREEN)} cost no step of their own")
            for prompt in read_prompts(bench):
                _ask(url, prompt.turns[0], args.max_new_tokens)
        _title("Some of the prompts in one process, method by method")
        options = ["--limit", "3", "--corpus", corpus, "--max-new-tokens", args.max_new_tokens]
        _finish("eval_jobs", "compare", "--bench", bench, *model, *options)
        print("\nvanilla takes a step for every token; the others draft, and keep only what the model chooses.")
        print("Beside other work on this machine the ratios mean little; run the last command again when it is idle.")


@contextmanager
def running(command: Sequence[object], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, so that it and its children end when the block does and not before."""
    words = [str(word) for word in command]
    print(_colour("$ " + shlex.join([Path(words[0]).name, *words[1:]]), _DIM), flush=True)
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(words, env=environment, start_new_session=True, **options)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_ENDED_WITHIN_S)
        except subprocess.TimeoutExpired:
            print("It does not end by itself and is killed.", file=sys.stderr)
        finally:  # also when Ctrl-C is pressed again
            _kill_group(process.pid)
            process.wait()


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _finish(*command: object) -> None:
    with running([_PYTHON, "-m", *command]) as process:
        if process.wait() != 0:
            raise ChildProcessError(f"{command[0]} {command[1]} failed")


@contextmanager
def _served(args: argparse.Namespace, corpus: Path, folder: Path) -> Iterator[str]:
    """The application on a private Ray and a free port; gives its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"model": args.model, "dtype": args.dtype, "device": args.device, "corpus": str(corpus)}
    application = {"name": "demo", "import_path": "serve_app:build", "args": settings}
    http = {"host": "127.0.0.1", "port": port}
    config = folder / "serve.json"  # JSON is YAML
    config.write_text(json.dumps({"proxy_location": "HeadOnly", "http_options": http, "applications": [application]}))
    log = folder / "serve.log"
    serve = [_PYTHON.parent / "serve", "run", "--address", "local", config]
    with log.open("wb") as output, running(serve, stdout=output, stderr=subprocess.STDOUT) as process:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(url, process, log)
        print(url)
        yield url


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _READY_WITHIN_S
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
    raise ChildProcessError("the application did not start; above is its log")


def _ask(url: str, text: str, max_tokens: int) -> None:
    """Stream one answer. An event is a step: all its tokens but the last were drafted."""
    print(f"\n{_colour('> ' + text, _BOLD)}")
    with httpx.Client(base_url=f"{url}/v1", timeout=120, trust_env=False) as client:
        model = client.get("/models").json()["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
        options = {"temperature": 0, "logprobs": True, "stream": True, "stream_options": {"include_usage": True}}
        options["speculation"] = {"method": "logitspec"}  # drafts in every step, whether they pay here or not
        with client.stream("POST", "/chat/completions", json=body | options) as response:
            reader = EventReader()
            for data in response.iter_bytes():
                for event in reader.feed(data):
                    _show(event)


def _show(event: dict[str, Any]) -> None:
    if "error" in event:
        raise ChildProcessError(f"the application failed: {event['error']['message']}")
    for choice in event["choices"]:
        content = choice["delta"].get("content") or ""
        tokens = [token["token"] for token in (choice["logprobs"] or {}).get("content") or ()]
        drafted = content.removesuffix(tokens[-1]) if len(tokens) > 1 else ""
        print(_colour(drafted, _GREEN) + content[len(drafted) :], end="", flush=True)
    if event["usage"]:
        spent = event["usage"]["speculation"]
        accepted = ", ".join(f"{count} from {source}" for source, count in spent["accepted"].items()) or "none"
        steps = f"{event['usage']['completion_tokens']} tokens, {spent['mean_accepted_tokens']:.2f} a step"
        print(_colour(f"\n  [{steps}; drafts accepted: {accepted}]", _DIM))


def _title(text: str) -> None:
    print(f"\n{_colour('== ', _BOLD)}{text}", flush=True)


def _colour(text: str, code: str) -> str:
    return f"{code}{text}{_PLAIN}" if text and sys.stdout.isatty() else text
