"""Opening a corpus: what is refused, and how it is named; remote corpora are read through the cache."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from cluster.retrieval import BuildParameters, Corpus, CorpusError, as_queries, verify
from cluster.retrieval.shard_file import map_shard
from tests.corpora import write_corpus

DOCUMENTS = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 9]]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus", DOCUMENTS, BuildParameters(), shards=2)
    return tmp_path / "corpus"


def change_manifest(directory: Path, **changes: object) -> None:
    file = directory / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_another_tokenizer_is_refused_and_both_are_named(directory: Path):
    with pytest.raises(CorpusError, match=r"tokenizer of none \(none\).*sha256:other"):
        Corpus.open(directory, tokenizer_fingerprint="sha256:other")
    assert Corpus.open(directory, tokenizer_fingerprint="none").sizes == (1, 2, 3, 4)


def test_other_format_versions_are_refused(directory: Path):
    change_manifest(directory, version=7)
    with pytest.raises(CorpusError, match="format version 7, this program reads version 1"):
        Corpus.open(directory)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, '{"format": "logitspec-corpus", "version": 1}'])
def test_damaged_manifest(directory: Path, text: str):
    (directory / "manifest.json").write_text(text)
    with pytest.raises(CorpusError, match=r"manifest\.json"):
        Corpus.open(directory)


def test_a_vocabulary_beyond_token_ids(directory: Path):
    change_manifest(directory, vocabulary=1 << 64)
    with pytest.raises(CorpusError, match=r"manifest\.json is damaged: vocabulary"):
        Corpus.open(directory)


def test_a_manifest_that_contradicts_itself(directory: Path):
    shards = json.loads((directory / "manifest.json").read_text())["shards"]
    for damage in (shards[:1], [shards[0], shards[0]]):
        change_manifest(directory, shards=damage)
        for read in (Corpus.open, verify):
            with pytest.raises(CorpusError, match=r"manifest\.json is damaged: .*shard"):
                read(directory)


def test_no_manifest_no_corpus(directory: Path):
    (directory / "manifest.json").unlink()
    with pytest.raises(CorpusError, match=r"holds no manifest\.json"):
        Corpus.open(directory)
    with pytest.raises(CorpusError, match="is not a directory"):
        Corpus.open(directory / "nowhere")


def test_truncated_and_missing_shards_are_named(directory: Path):
    shard = directory / "shard-00001.arrow"
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    with pytest.raises(CorpusError, match=r"shard-00001\.arrow has \d+ bytes where"):
        Corpus.open(directory)
    shard.unlink()
    with pytest.raises(CorpusError, match=r"shard-00001\.arrow is missing"):
        Corpus.open(directory)


def test_a_file_of_the_right_size_that_is_no_shard(directory: Path):
    shard = directory / "shard-00000.arrow"
    size = shard.stat().st_size
    shard.write_bytes(bytes(size))
    with pytest.raises(CorpusError, match=r"shard-00000\.arrow is damaged"):
        Corpus.open(directory)


def test_a_shard_with_columns_that_arrow_does_not_know(directory: Path):
    shard = directory / "shard-00000.arrow"
    content = shard.read_bytes()
    widths = content.count((64).to_bytes(4, "little"))
    assert widths
    shard.write_bytes(content.replace((64).to_bytes(4, "little"), (65).to_bytes(4, "little")))
    with pytest.raises(CorpusError, match=r"shard-00000\.arrow is damaged"):
        Corpus.open(directory)


def test_a_shard_in_the_place_of_another(directory: Path):
    assert map_shard(directory / "shard-00000.arrow", 0).home_slots
    with pytest.raises(CorpusError, match=r"shard-00000\.arrow holds another shard"):
        map_shard(directory / "shard-00000.arrow", 1)


def test_verify_finds_one_flipped_bit(directory: Path):
    assert verify(directory) == []
    shard = directory / "shard-00000.arrow"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    messages = verify(directory)
    assert len(messages) == 1
    assert "shard-00000.arrow is damaged" in messages[0]


@pytest.mark.parametrize("seed", range(5))
def test_random_damage_never_crashes_a_lookup(directory: Path, seed: int):
    """Bytes after the header are overwritten at random; answers may be wrong, but stay well formed."""
    random = np.random.default_rng(seed)
    for shard in sorted(directory.glob("shard-*.arrow")):
        content = np.frombuffer(shard.read_bytes(), np.uint8).copy()
        with pa.ipc.open_file(shard) as reader:
            body = sum(buffer.size for column in reader.get_batch(0).columns for buffer in column.buffers() if buffer)
        places = random.integers(len(content) // 2 - body // 2, len(content) // 2 + body // 4, 200)
        content[places] = random.integers(0, 256, 200)
        shard.write_bytes(content.tobytes())
    try:
        corpus = Corpus.open(directory)
    except CorpusError:
        return
    contexts = [[a, b] for a in range(10) for b in range(10)]
    result = corpus.lookup(*as_queries(contexts, 4), 64)
    assert len(result.tokens) == result.offsets[-1]
    assert ((result.tokens >= 0) & (result.tokens < corpus.manifest.vocabulary)).all()


def test_a_remote_corpus_is_copied_once_and_checked(directory: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    uri = f"local://{directory}"  # an fsspec file system, which is remote to the reader
    corpus = Corpus.open(uri, cache=cache)
    copies = sorted(cache.rglob("*.arrow"))
    assert [copy.name for copy in copies] == ["shard-00000.arrow", "shard-00001.arrow"]
    assert corpus.lookup(*as_queries([[1, 2]], 4), 4).tokens.tolist()[0] == 3
    before = copies[0].stat().st_mtime_ns
    Corpus.open(uri, cache=cache)
    assert copies[0].stat().st_mtime_ns == before
    (directory / "shard-00000.arrow").write_bytes(bytes(copies[0].stat().st_size))
    for copy in copies:
        copy.unlink()
    with pytest.raises(CorpusError, match=r"shard-00000\.arrow.* is damaged"):
        Corpus.open(uri, cache=cache)


def test_part_of_the_shards(directory: Path):
    whole = Corpus.open(directory)
    queries, lengths = as_queries([[token] for token in range(1, 10)], 4)
    matched = whole.lookup(queries, lengths, 1).matched
    parts = [Corpus.open(directory, shards=[shard]).lookup(queries, lengths, 1).matched for shard in (0, 1)]
    assert (parts[0] + parts[1]).tolist() == matched.tolist()
    assert all(part.any() for part in parts)
    with pytest.raises(CorpusError, match="no shard 2"):
        Corpus.open(directory, shards=[2])
