"""A tiny model in a directory, and a small benchmark like Spec-Bench."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.models import load_tokenizer, tokenizer_fingerprint
from cluster.retrieval import BuildParameters
from tests.corpora import write_corpus
from tests.tiny import tiny_model

CATEGORIES = ("writing", "coding", "translation", "summarization", "qa", "math_reasoning", "rag")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> str:
    directory = str(tmp_path_factory.mktemp("model"))
    loaded = tiny_model(seed=1)  # one that does not end its answers early
    loaded.model.save_pretrained(directory)
    loaded.tokenizer.save_pretrained(directory)
    return directory


def write_bench(path: Path, per_category: int) -> str:
    """Questions in the categories of Spec-Bench, MT-bench's with two turns, the mathematical ones with an answer."""
    lines = []
    for number, category in enumerate(CATEGORIES * per_category):
        turns = [f"Say {category} {number} and {category} {number}", "Say it again"][: 2 if number % 7 < 2 else 1]
        row = {"question_id": 81 + number, "category": category, "turns": turns}
        lines.append(json.dumps(row | ({"answer": "3"} if category == "math_reasoning" else {})))
    path.write_text("\n".join(lines))
    return str(path)


def write_text_corpus(path: Path, model_dir: str, text: str) -> str:
    """A reference corpus of a text, with the tokens (characters) and the fingerprint of the tiny model's tokenizer."""
    write_corpus(path, [[ord(c) for c in text]], BuildParameters())
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["tokenizer"]["fingerprint"] = tokenizer_fingerprint(load_tokenizer(model_dir))
    (path / "manifest.json").write_text(json.dumps(manifest))
    return str(path)
