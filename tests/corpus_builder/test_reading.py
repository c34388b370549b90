"""Input of every kind becomes the documents it holds; what is wrong with it is counted by kind."""

import gzip
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from cluster.models import load_tokenizer
from cluster.retrieval import CorpusError
from corpus_builder import plan as planning
from corpus_builder import tokenizing
from corpus_builder.documents import Problem
from corpus_builder.plan import make_plan
from corpus_builder.tokenizing import Tokenizing, split_text
from tests.corpora import WORDS, word_tokenizer, words
from tests.tiny import byte_tokenizer

DOCUMENTS = [[1, 2, 3], [70, 69_999, 5, 6, 7], [8, 9], list(range(100, 160))]
TEXTS = [words(document) for document in DOCUMENTS]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return load_tokenizer(word_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def read(
    paths: list[Path], tokenizer: PreTrainedTokenizerBase | None, fields: tuple[str, ...] | None = None, **options: Any
) -> tuple[list[list[int]], dict[str, int]]:
    """Documents and problems of input files, through the plan's partitions."""
    plan = make_plan([str(path) for path in paths], options.get("kind"), fields)
    problems: Counter[str] = Counter(plan.problems)
    documents = []
    for partition in plan.partitions:
        documents += Tokenizing(tokenizer, fields, 2).documents(partition, problems)
    return [document.tolist() for document in documents], {k: n for k, n in problems.items() if n}


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def data_set(directory: Path, texts: list[str]) -> None:
    """A data set as the `datasets` library saves it: Arrow streams, and a state that lists them."""
    directory.mkdir(parents=True)
    files = []
    for number, part in enumerate((texts[:1], texts[1:])):
        name = f"data-{number:05d}-of-00002.arrow"
        table = pa.table({"text": part})
        with pa.OSFile(str(directory / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
        files.append({"filename": name})
    (directory / "state.json").write_text(json.dumps({"_data_files": files}))
    (directory / "dataset_info.json").write_text("{}")


def input_of_kind(kind: str, folder: Path) -> Path:
    """TEXTS in a file or directory of this kind."""
    if kind == "parquet":
        pq.write_table(pa.table({"id": range(4), "text": TEXTS}), folder / "a.parquet", row_group_size=3)
        return folder / "a.parquet"
    if kind == "jsonl":
        return jsonl(folder / "a.jsonl", [{"text": text} for text in TEXTS])
    if kind == "jsonl.gz":
        with gzip.open(folder / "a.jsonl.gz", "wt") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in TEXTS)
        return folder / "a.jsonl.gz"
    if kind == "json.gz":
        (folder / "a.json.gz").write_bytes(gzip.compress(json.dumps([{"text": text} for text in TEXTS]).encode()))
        return folder / "a.json.gz"
    if kind == "json with a byte order mark":
        (folder / "a.json").write_text(json.dumps([{"text": text} for text in TEXTS]), encoding="utf-8-sig")
        return folder / "a.json"
    if kind == "jsonl with a byte order mark":
        jsonl(folder / "a.jsonl", [{"text": text} for text in TEXTS])
        (folder / "a.jsonl").write_text((folder / "a.jsonl").read_text(), encoding="utf-8-sig")
        return folder / "a.jsonl"
    if kind == "json":
        (folder / "a.json").write_text(json.dumps([{"text": text} for text in TEXTS]))
        return folder / "a.json"
    if kind == "lines":
        (folder / "a.dat").write_text("\r\n".join(TEXTS))
        return folder / "a.dat"
    if kind == "text":
        for number, text in enumerate(TEXTS):
            (folder / f"{number}.txt").write_text(text)
        return folder
    if kind == "data set":
        data_set(folder / "set", TEXTS)
        return folder / "set"
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    data_set(folder / "train", TEXTS[:2])
    data_set(folder / "test", TEXTS[2:])
    return folder


@pytest.mark.parametrize("partition_bytes", [1 << 20, 40])
@pytest.mark.parametrize(
    "kind",
    [
        "parquet",
        "jsonl",
        "jsonl.gz",
        "jsonl with a byte order mark",
        "json",
        "json.gz",
        "json with a byte order mark",
        "lines",
        "text",
        "data set",
        "data set of splits",
    ],
)
def test_kinds_of_input(
    kind: str,
    partition_bytes: int,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(planning, "PARTITION_BYTES", partition_bytes)
    path = input_of_kind(kind, tmp_path)
    documents, problems = read([path], tokenizer, kind="lines" if kind == "lines" else None)
    assert (documents, problems) == (DOCUMENTS, {})


@pytest.mark.parametrize("size", [1, 7, 40, 100])
def test_partitions_cut_lines_nowhere(
    size: int, tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(planning, "PARTITION_BYTES", size)
    rows = [{"text": words(range(n, n + n % 5 + 2))} for n in range(12)]
    path = jsonl(tmp_path / "a.jsonl", rows)
    path.write_text(path.read_text().replace("\n", "\n\n", 3).rstrip("\n"))  # empty lines, none at the end
    documents, problems = read([path], tokenizer)
    assert documents == [list(range(n, n + n % 5 + 2)) for n in range(12)]
    assert problems == {}


def test_long_documents_are_tokenized_in_pieces(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
):
    document = np.random.default_rng(0).integers(0, WORDS, 5000).tolist()
    (tmp_path / "long.txt").write_text(words(document))
    monkeypatch.setattr(tokenizing, "PIECE", 100)
    monkeypatch.setattr(tokenizing, "_BATCH", 1000)
    assert read([tmp_path], tokenizer) == ([document], {})


def test_pieces_are_the_text():
    text = "word  " * 400_000 + "x" * 2_500_000
    pieces = list(split_text(text))
    assert "".join(pieces) == text
    assert all(len(piece) <= tokenizing.PIECE for piece in pieces)
    assert pieces[1].startswith("  word")


def test_text_files_beyond_the_bound_are_cut_at_lines(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(planning, "TEXT_BYTES", 20)
    (tmp_path / "big.txt").write_text("t1 t2\nt3 t4 t5 t6 t7\nt8\n")
    documents, problems = read([tmp_path / "big.txt"], tokenizer)
    assert documents == [[1, 2, 3, 4, 5, 6, 7], [8]]
    assert problems == {Problem.CUT: 1, Problem.SHORT: 1}


def test_bad_rows_are_counted_and_the_rest_is_read(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    lines = [
        b'{"text": "t1 t2"}',
        b'{"text": ""}',
        b'{"text": "   "}',
        b'{"text": null}',
        b'{"other": "t1"}',
        b'{"text": 5}',
        b'{"text": {"a": 1}}',
        b'{"text": "t3 t\xff t4"}',
        b'{"text": "t5 \\ud800"}',
        b"not json",
        b"[1, 2]",
        b"[" * 100_000,
        b'{"text": "t6"}',
    ]
    (tmp_path / "bad.jsonl").write_bytes(b"\n".join(lines))
    documents, problems = read([tmp_path / "bad.jsonl"], tokenizer)
    assert documents == [[1, 2], [3, WORDS, 4], [5, WORDS], [6]]
    assert problems == {
        Problem.EMPTY: 2,
        Problem.NULL: 1,
        Problem.MISSING: 1,
        Problem.NOT_TEXT: 2,
        Problem.NOT_UTF8: 2,
        Problem.BAD_JSON: 3,
        Problem.SHORT: 1,
    }


def test_bad_parquet_cells(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    cells = pa.array([b"t1 t2", None, b"t3 \xfe\xff t4", b""], pa.binary()).view(pa.string())
    nested = pa.array([["t1"], None, [], ["t2", "t3"]])
    pq.write_table(pa.table({"a": cells, "b": nested, "n": [1, 2, 3, 4]}), tmp_path / "bad.parquet")
    documents, problems = read([tmp_path / "bad.parquet"], tokenizer, ("a", "b", "c"))
    assert documents == [[1, 2, 1], [3, WORDS, 4], [2, 3]]
    assert problems == {Problem.NULL: 2, Problem.NOT_UTF8: 1, Problem.MISSING: 4}


def test_fields_are_joined_in_the_order_named(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    path = jsonl(tmp_path / "a.jsonl", [{"completion": "t2", "prompt": "t1\n"}, {"prompt": "t3", "completion": "t4"}])
    assert read([path], tokenizer)[0] == [[1, 2], [3, 4]]
    assert read([path], tokenizer, ("completion", "prompt"))[0] == [[2, 1], [4, 3]]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
        {
            "turns": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": "ho"},
            ]
        },
    ],
)
def test_chats_are_rendered_as_the_model_sees_them(row: dict[str, Any], tmp_path: Path):
    tokenizer = byte_tokenizer()
    jsonl(tmp_path / "a.jsonl", [row])
    documents, problems = read([tmp_path], tokenizer)
    assert tokenizer.decode(documents[0]) == "<|user|>hi<|end|><|assistant|>ho<|end|><|assistant|>"
    assert problems == {}


def test_roles_that_are_no_text(tmp_path: Path):
    jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "\ud800", "content": "hi"}]}])
    documents, problems = read([tmp_path], byte_tokenizer())
    assert byte_tokenizer().decode(documents[0]) == "<|?|>hi<|end|><|assistant|>"
    assert problems == {Problem.NOT_UTF8: 1}


def test_turns_without_roles_and_chats_without_template(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    messages = [{"role": "user", "content": "t1"}, {"role": "assistant", "content": "t2"}]
    path = jsonl(tmp_path / "a.jsonl", [{"turns": ["t5 t6", "t7"]}, {"messages": messages}, {"messages": [3]}])
    documents, problems = read([path], tokenizer)
    assert documents == [[5, 6, 7], [1, 2]]
    assert problems == {Problem.NOT_TEXT: 1}


def test_a_chat_that_the_template_refuses_is_read_as_text(tmp_path: Path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": "ho"}]}])
    documents, problems = read([tmp_path], tokenizer)
    assert tokenizer.decode(documents[0]) == "hi\nho"
    assert problems == {Problem.TEMPLATE: 1}


def test_rows_of_token_ids(tmp_path: Path):
    rows: list[Any] = [[1, 2, 200_000], [], None, [-1, 2], [2**31], [1.5], [7, 8], 5, True, 1.5, "1", {"1": 2}]
    path = jsonl(tmp_path / "a.jsonl", [{"token_ids": row} for row in rows])
    documents, problems = read([path], None)
    assert documents == [[1, 2, 200_000], [7, 8]]
    assert problems == {Problem.EMPTY: 1, Problem.NULL: 1, Problem.BAD_IDS: 8}


def test_columns_of_token_ids_that_hold_text(tmp_path: Path):
    pq.write_table(pa.table({"token_ids": ["1", "ab"]}), tmp_path / "a.parquet")
    assert read([tmp_path / "a.parquet"], None) == ([], {Problem.BAD_IDS: 2})


def test_what_cannot_be_planned_says_why(tmp_path: Path):
    with pytest.raises(CorpusError, match="does not exist"):
        make_plan([str(tmp_path / "nowhere.jsonl")], None, None)
    (tmp_path / "picture.png").write_bytes(b"x")
    with pytest.raises(CorpusError, match="nothing to read in"):
        make_plan([str(tmp_path)], None, None)
    pq.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match=r"none of the fields text; its columns are a, b"):
        make_plan([str(tmp_path / "a.parquet")], None, ["text"])
    with pytest.raises(CorpusError, match=r"no field known to hold text.*--text-fields"):
        make_plan([str(tmp_path / "a.parquet")], None, None)
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / os.fsdecode(b"\xff.txt")).write_text("t1")
    with pytest.raises(CorpusError, match=r"strange holds a name that is not UTF-8"):
        make_plan([str(strange)], None, None)
    for name in (os.fsdecode(b"\xff.txt"), "a\0b"):
        with pytest.raises(CorpusError, match="cannot reach"):
            make_plan([name], None, None)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(CorpusError, match=r"cannot read .*broken\.parquet as parquet"):
        make_plan([str(tmp_path / "broken.parquet")], None, None)
    with pytest.raises(CorpusError, match="cannot use nonsense://"):
        make_plan(["nonsense://bucket/file.jsonl"], None, None)


@pytest.mark.parametrize("name", ["state.json", "dataset_dict.json"])
@pytest.mark.parametrize(
    "content", ["[]", "not json", '{"splits": 5, "_data_files": 5}', '{"splits": null, "_data_files": ["x"]}']
)
def test_files_named_as_those_of_a_data_set(
    name: str, content: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
):
    (tmp_path / name).write_text(content)
    (tmp_path / "b.txt").write_text("t5 t6")
    assert read([tmp_path], tokenizer)[0] == [[5, 6]]


def test_a_json_file_that_is_no_array(tmp_path: Path):
    (tmp_path / "a.json").write_text("5")
    with pytest.raises(CorpusError, match=r"a\.json is no JSON array"):
        read([tmp_path / "a.json"], None, kind="json")


def test_hidden_and_unknown_files_of_a_directory(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.txt").write_text("t1 t2")
    (tmp_path / "_SUCCESS").write_text("")
    (tmp_path / "notes.bin").write_text("t3 t4")
    (tmp_path / "b.txt").write_text("t5 t6")
    assert read([tmp_path], tokenizer) == ([[5, 6]], {Problem.SKIPPED: 1})
