"""Harvesting on Ray: the engine's own answers, each once whatever is killed; bad prompts counted; their corpus."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster.decoding.params import SamplingParams, Speculation
from cluster.engine import Engine, Request
from cluster.models import ModelConfig, load_model, render_chat, tokenizer_fingerprint
from cluster.retrieval import Corpus, Manifest, as_queries
from corpus_builder.__main__ import main
from corpus_builder.answering import AnswerSettings
from corpus_builder.answers import open_answers
from corpus_builder.engines import running_engines, share
from corpus_builder.harvest import Harvest, HarvestRequest, harvest
from corpus_builder.requests import Execution
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("ray_cluster")
EXECUTION = Execution(parallelism=2)
SAMPLING = SamplingParams(max_new_tokens=60)
PROMPTS = [f"Say {n} and {n * n} again" for n in range(24)]
BAD_LINES = {"not json": "line 1: not JSON", '{"prompt": 5}': "line 2: needs"}
TOO_LONG = "long " * 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = str(tmp_path_factory.mktemp("model"))
    loaded = tiny_model(seed=1)  # one that does not end its answers early
    loaded.model.save_pretrained(directory)
    loaded.tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good prompts, some of them twice, behind three that cannot be answered."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    good = [json.dumps({"prompt": prompt, "category": "c"}) for prompt in [TOO_LONG, *PROMPTS, *PROMPTS[:3]]]
    path.write_text("\n".join([*BAD_LINES, *good]))
    return path


def settings_of(model: str) -> AnswerSettings:
    return AnswerSettings(
        model=ModelConfig(model=model, dtype="float32"),
        sampling=SAMPLING,
        speculation=Speculation(method="vanilla"),
        batch=3,
    )


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(
    ray_cluster: None, model: str, prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Harvest, Manifest]:
    """A harvest of all prompts by two engines."""
    out = tmp_path_factory.mktemp("harvest") / "whole"
    request = HarvestRequest(prompts=str(prompts), out=str(out), settings=settings_of(model), cpus=2, shards=2)
    return out, *harvest(request, EXECUTION)


def test_rows_are_what_the_engine_answers(whole: tuple[Path, Harvest, Manifest], model: str):
    out, made, _ = whole
    loaded = load_model(ModelConfig(model=model, dtype="float32"))
    inputs = [render_chat(loaded.tokenizer, [{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    outputs = Engine(loaded).generate([Request(ids, SAMPLING) for ids in inputs])
    rows = {row["prompt"]: row for row in rows_of(out)}
    assert list(rows) == [*BAD_LINES, TOO_LONG, *PROMPTS]
    for prompt, ids, output in zip(PROMPTS, inputs, outputs, strict=True):
        assert rows[prompt]["token_ids"] == ids[-4:] + output.token_ids
        assert rows[prompt]["prompt_tokens"] == 4
        assert (rows[prompt]["text"], rows[prompt]["category"]) == (output.text, "c")
    assert (made.wanted, made.found, made.answered, made.lost) == (27, 0, 24, 0)
    assert made.tokens == sum(len(output.token_ids) for output in outputs)
    assert list(made.failed) == [*BAD_LINES, TOO_LONG]
    assert all(made.failed[line].startswith(reason) for line, reason in BAD_LINES.items())
    assert "leaves no room" in made.failed[TOO_LONG]


def test_the_corpus_holds_the_answers_as_they_were_emitted(whole: tuple[Path, Harvest, Manifest]):
    out, _, manifest = whole
    answered = [row for row in rows_of(out) if "token_ids" in row]
    assert manifest.tokens == sum(len(row["token_ids"]) for row in answered)
    assert (manifest.documents, len(manifest.shards)) == (len(PROMPTS), 2)
    corpus = Corpus.open(out, tokenizer_fingerprint=tokenizer_fingerprint(tiny_model().tokenizer))
    for row in answered[:5]:
        found = corpus.lookup(*as_queries([row["token_ids"][:-1]], 4), 64)
        assert row["token_ids"][-1] in found.tokens
        assert found.matched[0] == 4


def test_a_killed_harvest_goes_on_where_it_was(
    whole: tuple[Path, Harvest, Manifest], model: str, prompts: Path, tmp_path: Path
):
    """kill -9 loses and repeats nothing, a line that it cut short is done again, and the corpus is the same."""
    out = tmp_path / "out"
    options = {"prompts": prompts, "out": out, "model": model, "dtype": "float32", "batch": 2, "limit": 20}
    options["method"] = "vanilla"
    options["max-new-tokens"] = SAMPLING.max_new_tokens
    log = tmp_path / "log"
    process = subprocess.Popen(
        [sys.executable, "-m", "corpus_builder", "harvest", *(f"--{name}={value}" for name, value in options.items())],
        cwd=Path(__file__).parents[2],
        stderr=log.open("w"),
    )
    path = out / "answers.jsonl"
    deadline = time.monotonic() + 100
    while process.poll() is None and time.monotonic() < deadline:
        if path.exists() and path.read_bytes().count(b"\n") >= 6:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, log.read_text()
    before = rows_of(out)
    assert not (out / "manifest.json").exists()
    with path.open("a") as file:
        file.write('{"prompt": "Say')

    request = HarvestRequest(prompts=str(prompts), out=str(out), settings=settings_of(model), cpus=4, shards=2)
    made, manifest = harvest(request, EXECUTION)
    assert made.found == len(before) < 20
    assert made.answered + made.found == made.wanted
    assert rows_of(out) == rows_of(whole[0])
    assert manifest.corpus_id == whole[2].corpus_id


def test_a_killed_engine_comes_back_and_no_prompt_is_lost(whole: tuple[Path, Harvest, Manifest], model: str):
    expected = {row["prompt"]: row["token_ids"] for row in rows_of(whole[0]) if "token_ids" in row}
    with running_engines(settings_of(model), cpus=4) as engines:
        assert len(engines) == 1
        answers = []
        for prompt, fields in share(PROMPTS, engines, 3):
            assert fields is not None
            answers.append((prompt, fields["token_ids"]))
            if len(answers) == 5:
                os.kill(ray.get(engines[0].__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    assert len(answers) == len(PROMPTS)
    assert dict(answers) == expected


def test_what_cannot_be_harvested_says_why(
    whole: tuple[Path, Harvest, Manifest], model: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def errors(**options: str) -> str:
        given = {"prompts": str(prompts), "out": str(whole[0]), "model": model, "dtype": "float32", **options}
        assert main(["harvest", *(f"--{name}={value}" for name, value in given.items())]) == 2
        line = capsys.readouterr().err.splitlines()[-1]  # behind the progress bar
        assert line.startswith("error: ")
        return line

    assert "cannot read prompts from nowhere.jsonl" in errors(prompts="nowhere.jsonl")
    (tmp_path / "corpus").mkdir()
    shutil.copy(whole[0] / "manifest.json", tmp_path / "corpus")
    assert "holds a corpus that was not harvested" in errors(out=str(tmp_path / "corpus"))
    assert "is remote" in errors(out="memory://corpus")
    assert "holds answers of another model or other settings" in errors(temperature="0.5")
    assert "max_new_tokens" in errors(**{"max-new-tokens": "0"})
    with open_answers(whole[0]):
        assert "another harvest is writing to" in errors()
    assert "use a smaller --cpus" in errors(out=str(tmp_path), cpus="999")
