"""Building on Ray: the same bytes at any parallelism and after any interruption; appending; budgets; refusals."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.retrieval import BuildParameters, Corpus, CorpusError, Manifest, as_queries, verify
from corpus_builder import build as building
from corpus_builder import plan as planning
from corpus_builder.__main__ import main
from corpus_builder.build import append, build
from corpus_builder.requests import BuildRequest, Execution
from tests.corpora import Documents, paths_of, scan, word_tokenizer, words

pytestmark = pytest.mark.usefixtures("ray_cluster")
SERIAL = Execution(parallelism=1)
PARALLEL = Execution(parallelism=2)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return word_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def small_partitions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planning, "PARTITION_BYTES", 3000)


def some_documents(seed: int, count: int) -> Documents:
    """Documents that share much, with token ids beyond 16 bits."""
    source = random.Random(seed)
    pieces = [[source.choice([1, 2, 3, 4, 68_000, 69_999]) for _ in range(12)] for _ in range(20)]
    return [[token for _ in range(source.randrange(1, 5)) for token in source.choice(pieces)] for _ in range(count)]


def write(path: Path, documents: Documents) -> str:
    path.write_text("".join(json.dumps({"text": words(document)}) + "\n" for document in documents))
    return str(path)


def checksums(manifest: Manifest) -> list[str]:
    return [shard.sha256 for shard in manifest.shards]


def test_any_parallelism_gives_the_same_bytes_and_they_are_right(tmp_path: Path, tokenizer: str):
    documents = some_documents(0, 120)
    source = write(tmp_path / "a.jsonl", documents)
    made = [
        build(
            BuildRequest(inputs=(source,), out=str(tmp_path / f"out{number}"), tokenizer=tokenizer, shards=3),
            execution,
        )
        for number, execution in enumerate((SERIAL, PARALLEL))
    ]
    texts = [(tmp_path / f"out{number}" / "manifest.json").read_bytes() for number in (0, 1)]
    assert texts[0] == texts[1]
    assert len(made[0].token_files or ()) > 3
    assert verify(tmp_path / "out0") == verify(tmp_path / "out1") == []
    names = {shard.name for shard in made[0].shards} | {file.name for file in made[0].token_files or ()}
    assert {path.name for path in (tmp_path / "out0").iterdir()} == {"manifest.json", *names}

    corpus = Corpus.open(tmp_path / "out0")
    truth = scan(documents, corpus.sizes, 10)
    assert (made[0].ngrams, made[0].documents) == (len(truth), len(documents))
    assert made[0].tokens == sum(len(document) for document in documents)
    result = corpus.lookup(*as_queries([list(ngram) for ngram in truth], 4), 64)
    for q, (ngram, (total, paths)) in enumerate(truth.items()):
        assert (result.matched[q], result.totals[q]) == (len(ngram), total)
        found = paths_of(result, q)
        assert found.items() <= paths.items()
        assert len(found) == min(len(paths), 64)


def test_append_is_a_build_over_both(tmp_path: Path, tokenizer: str):
    first, second = some_documents(1, 60), some_documents(2, 60)
    a, b = write(tmp_path / "a.jsonl", first), write(tmp_path / "b.jsonl", [*second, *first[:5]])
    parameters = BuildParameters(min_count=2)
    options = {"tokenizer": tokenizer, "shards": 2, "parameters": parameters}
    both = build(BuildRequest(inputs=(a, b), out=str(tmp_path / "both"), **options), PARALLEL)
    part = build(BuildRequest(inputs=(a,), out=str(tmp_path / "part"), **options), PARALLEL)
    reader = Corpus.open(tmp_path / "part")
    grown = append(str(tmp_path / "part"), [b], PARALLEL)
    assert checksums(grown) == checksums(both) != checksums(part)
    assert grown.corpus_id == both.corpus_id
    assert (grown.tokens, grown.documents, grown.generation) == (both.tokens, both.documents, 1)
    assert verify(tmp_path / "part") == []
    assert len(list((tmp_path / "part").glob("shard-*"))) == 2
    assert reader.lookup(*as_queries([first[0][:3]], 4), 4).matched[0] == 3  # mapped before, and still there


def test_a_corpus_that_another_build_changed_meanwhile_is_left_alone(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
):
    sources = [write(tmp_path / f"{seed}.jsonl", some_documents(seed, 10)) for seed in (20, 21, 22)]
    out = str(tmp_path / "out")
    request = BuildRequest(inputs=(sources[0],), out=out, tokenizer=tokenizer)
    load = building.tokenizer_of

    def overtaken(by: Callable[[], Manifest]) -> Callable[[str], Any]:
        def load_slowly(name: str) -> Any:
            monkeypatch.setattr(building, "tokenizer_of", load)
            by()
            return load(name)

        return load_slowly

    monkeypatch.setattr(building, "tokenizer_of", overtaken(lambda: build(request, PARALLEL)))
    with pytest.raises(CorpusError, match="another build has changed"):
        build(request, PARALLEL)
    monkeypatch.setattr(building, "tokenizer_of", overtaken(lambda: append(out, [sources[1]], PARALLEL)))
    with pytest.raises(CorpusError, match="another build has changed"):
        append(out, [sources[2]], PARALLEL)
    assert verify(out) == []
    assert Corpus.open(out).manifest.documents == 20


def test_budget(tmp_path: Path, tokenizer: str):
    source = write(tmp_path / "a.jsonl", [*some_documents(3, 150), random.Random(4).sample(range(60_000), 4000)])
    options = {"inputs": (source,), "tokenizer": tokenizer, "shards": 2}
    whole = build(BuildRequest(out=str(tmp_path / "whole"), **options), PARALLEL)
    budget = whole.shard_bytes // 2
    parameters = BuildParameters(max_bytes=budget)
    pruned = build(BuildRequest(out=str(tmp_path / "pruned"), parameters=parameters, **options), PARALLEL)
    assert budget * 0.7 < pruned.shard_bytes <= budget
    assert 0 < pruned.ngrams < whole.ngrams
    roomy = BuildParameters(max_bytes=whole.shard_bytes * 3)
    kept = build(BuildRequest(out=str(tmp_path / "roomy"), parameters=roomy, **options), PARALLEL)
    assert checksums(kept) == checksums(whole)
    parameters = BuildParameters(max_bytes=1000)
    with pytest.raises(CorpusError, match="--max-bytes 1000 is too small"):
        build(BuildRequest(out=str(tmp_path / "tiny"), parameters=parameters, **options), PARALLEL)


def test_memory_bound_refuses_and_names_what_helps(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(building, "_BYTES_A_POSITION", 1 << 20)
    source = write(tmp_path / "a.jsonl", [random.Random(5).sample(range(60_000), 2000)])
    request = BuildRequest(inputs=(source,), out=str(tmp_path / "out"), tokenizer=tokenizer, shards=1)
    tight = Execution(parallelism=2, memory_mb=1000)
    with pytest.raises(CorpusError, match=r"more than the 1000 MB a worker may use; use --shards \d+ or more"):
        build(request, tight)
    assert list((tmp_path / "out").glob("tokens-*"))
    with pytest.raises(CorpusError, match=r"holds no manifest\.json"):
        Corpus.open(tmp_path / "out")
    assert len(build(request.model_copy(update={"shards": None}), tight).shards) > 1


def test_overwriting_and_refusing_to(tmp_path: Path, tokenizer: str):
    sources = [write(tmp_path / f"{seed}.jsonl", some_documents(seed, 30)) for seed in (6, 7)]
    request = BuildRequest(inputs=(sources[0],), out=str(tmp_path / "out"), tokenizer=tokenizer, keep_tokens=False)
    build(request, PARALLEL)
    with pytest.raises(CorpusError, match="holds a corpus already"):
        build(request, PARALLEL)
    with pytest.raises(CorpusError, match="--no-keep-tokens"):
        append(request.out, [sources[1]], PARALLEL)
    other = build(request.model_copy(update={"inputs": (sources[1],), "overwrite": True}), PARALLEL)
    assert Corpus.open(request.out).manifest == other
    assert len(list((tmp_path / "out").iterdir())) == 1 + len(other.shards)


def test_a_corpus_on_a_remote_file_system(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOGITSPEC_CACHE", str(tmp_path / "cache"))
    source = write(tmp_path / "a.jsonl", some_documents(8, 40))
    here = build(BuildRequest(inputs=(source,), out=str(tmp_path / "here"), tokenizer=tokenizer, shards=2), PARALLEL)
    remote = f"local://{tmp_path}/there"  # an fsspec file system, which is remote to the builder
    there = build(BuildRequest(inputs=(f"local://{source}",), out=remote, tokenizer=tokenizer, shards=2), PARALLEL)
    assert there == here
    assert verify(remote) == []
    assert not (tmp_path / "there" / ".build").exists()


def test_input_without_documents(tmp_path: Path, tokenizer: str):
    (tmp_path / "a.jsonl").write_text('{"text": null}\n{"text": ""}\n')
    request = BuildRequest(inputs=(str(tmp_path / "a.jsonl"),), out=str(tmp_path / "out"), tokenizer=tokenizer)
    with pytest.raises(CorpusError, match=r"no document was found.*1 × empty_document, 1 × null_field"):
        build(request, PARALLEL)


def test_problems_and_documents_without_ngrams_are_in_the_manifest(tmp_path: Path, tokenizer: str):
    (tmp_path / "a.jsonl").write_text('{"text": "t1"}\n{"text": null}\nnonsense\n')
    request = BuildRequest(inputs=(str(tmp_path / "a.jsonl"),), out=str(tmp_path / "out"), tokenizer=tokenizer)
    made = build(request, PARALLEL)
    assert (made.documents, made.tokens, made.ngrams) == (1, 1, 0)
    assert made.problems == {
        "document_shorter_than_an_ngram": 1,
        "line_that_is_no_json_object": 1,
        "null_field": 1,
    }
    assert Corpus.open(tmp_path / "out").lookup(*as_queries([[1]], 4), 4).matched.tolist() == [0]


def test_a_killed_build_goes_on_where_it_was(tmp_path: Path, tokenizer: str):
    """kill -9 in the middle leaves no corpus; the next build keeps finished files and ends with the same bytes."""
    documents = some_documents(9, 1500)
    source = write(tmp_path / "a.jsonl", documents)
    out = tmp_path / "out"
    code = (
        "import sys; from corpus_builder import plan; from corpus_builder.__main__ import main;"
        "plan.PARTITION_BYTES = 3000; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["build", "--input", source, "--out", str(out), "--tokenizer", tokenizer, "--shards", "2"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments, "--parallelism", "2"],
        cwd=Path(__file__).parents[2],
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 100
    while process.poll() is None and len(list(out.glob("tokens-*"))) < 5 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    with pytest.raises(CorpusError, match=r"holds no manifest\.json"):
        Corpus.open(out)
    survivors = {path.name: path.stat().st_mtime_ns for path in out.glob("tokens-*")}
    assert survivors

    request = BuildRequest(inputs=(source,), out=str(out), tokenizer=tokenizer, shards=2)
    resumed = build(request, PARALLEL)
    kept = [name for name, changed in survivors.items() if (out / name).stat().st_mtime_ns == changed]
    assert kept
    clean = build(request.model_copy(update={"out": str(tmp_path / "clean")}), PARALLEL)
    assert resumed == clean
    assert not list(out.glob(".*"))


def test_leftovers_of_another_build_are_not_used(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch):
    source = write(tmp_path / "a.jsonl", some_documents(10, 30))
    request = BuildRequest(inputs=(source,), out=str(tmp_path / "out"), tokenizer=tokenizer, shards=2)
    with monkeypatch.context() as patch:
        patch.setattr(building, "_aggregate", lambda *_: (_ for _ in ()).throw(CorpusError("stopped")))
        with pytest.raises(CorpusError, match="stopped"):
            build(request, PARALLEL)
    before = {path.name for path in (tmp_path / "out" / ".build").glob("fragments-*")}
    assert before
    write(tmp_path / "a.jsonl", some_documents(11, 30))
    os.utime(source, (1, 1))
    other = build(request, PARALLEL)
    clean = build(request.model_copy(update={"out": str(tmp_path / "clean")}), PARALLEL)
    assert other == clean


def test_command_line(tmp_path: Path, tokenizer: str, capfd: pytest.CaptureFixture[str]):
    source = write(tmp_path / "a.jsonl", [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4]])
    out = str(tmp_path / "out")
    assert main(["build", "--input", source, "--out", out, "--tokenizer", tokenizer, "--parallelism", "1"]) == 0
    assert "tokens      12" in capfd.readouterr().out
    assert main(["inspect", out, "--json"]) == 0
    figures = json.loads(capfd.readouterr().out)
    assert (figures["tokens"], figures["documents"], figures["shards"]) == (12, 3, 1)
    assert figures["bytes"] == sum(path.stat().st_size for path in Path(out).glob("*.arrow"))
    assert main(["query", out, "t9 t2 t3"]) == 0
    shown = capfd.readouterr().out
    assert "'t2 t3' (2 tokens) is followed 3 times" in shown
    assert "├─ 't4'  2  (67%)" in shown
    assert "└─ 't5'  1  (33%)" in shown
    assert main(["query", out, "t2", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["tokens"] == [3, 4, 5]
    assert main(["query", out, "t8"]) == 0
    assert "does not know" in capfd.readouterr().out
    assert main(["append", out, "--input", source, "--parallelism", "1"]) == 0
    assert main(["verify", out]) == 0
    shard = next(Path(out).glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    capfd.readouterr()
    assert main(["verify", out]) == 2
    assert shard.name in capfd.readouterr().err


@pytest.mark.parametrize("option", ["--max-nodes", "--keys"])
@pytest.mark.parametrize("value", ["0", "-1", "3000000000", "x"])
def test_numbers_out_of_range(option: str, value: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["bench", "nowhere", option, value])
    assert f"argument {option}: {value!r} is not a number from 1 up" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "--input", "nowhere.txt", "--out", "OUT"], "nowhere.txt does not exist"),
        (["build", "--input", "SOURCE", "--out", "OUT", "--sizes", "3,2"], "sizes must rise"),
        (["build", "--input", "SOURCE", "--out", "OUT", "--tokenizer", "no/such/model"], "no/such/model"),
        (["build", "--input", "SOURCE", "--out", "/proc/nowhere"], "cannot write to /proc/nowhere"),
        (["inspect", "nowhere"], "nowhere is not a directory"),
        (["verify", "OUT"], "is not a directory"),
        (["query", "OUT", "text"], "is not a directory"),
        (["query", "OUT", os.fsdecode(b"\xff")], "the text: holds half a surrogate pair"),
        (["append", "OUT", "--input", "SOURCE"], "is not a directory"),
        (["bench"], "name a corpus to measure"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenizer: str
):
    source = write(tmp_path / "a.jsonl", [[1, 2]])
    given = {"OUT": str(tmp_path / "out"), "SOURCE": source}
    arguments = [given.get(argument, argument) for argument in arguments]
    if arguments[0] == "build" and "--tokenizer" not in arguments:
        arguments += ["--tokenizer", tokenizer]
    assert main(arguments) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert message in errors[0]
