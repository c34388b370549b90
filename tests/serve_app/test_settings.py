"""The builder's arguments: defaults, inheritance, refusals, and what becomes of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pydantic import ValidationError

from cluster.decoding.params import SamplingParams, Speculation
from cluster.engine import Request
from cluster.models import load_tokenizer, tokenizer_fingerprint
from cluster.retrieval import BuildParameters, CorpusError
from serve_app import ServeSettings
from serve_app.target_model import make_engine, warm_up
from tests.corpora import write_corpus


def test_command_line_values_are_text():
    settings = ServeSettings.model_validate({"model": "a/b", "kv_cache_gib": "2.5", "max_replicas": "3"})
    (model,) = settings.served_models()
    assert (model.served_name, model.kv_cache_gib, model.max_replicas) == ("b", 2.5, 3)


def test_models_inherit_what_stands_beside_them():
    models = [{"model": "x/one"}, {"model": "x/two", "name": "second", "dtype": "float32"}]
    settings = ServeSettings.model_validate({"dtype": "bfloat16", "replicas": 2, "models": models})
    one, two = settings.served_models()
    assert (one.served_name, one.dtype, one.replicas) == ("one", "bfloat16", 2)
    assert (two.served_name, two.dtype, two.replicas) == ("second", "float32", 2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"modle": "x"}, "modle"),
        ({"method": "magic"}, "method"),
        ({"method": "rest"}, "corpus"),
        ({"kv_cache_gib": 0}, "kv_cache_gib"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas"),
        ({"models": [{"model": "a/x"}, {"model": "b/x"}]}, "'x'"),
        ({"name": "n", "models": [{"model": "a/x"}]}, "name"),
        ({"limits": {"max_body_bytes": 1}}, "max_body_bytes"),
    ],
)
def test_wrong_arguments_are_named(arguments, says):
    with pytest.raises(ValidationError, match=says):
        ServeSettings.model_validate(arguments)


def test_the_engine_drafts_from_its_corpus(tiny_model, tmp_path):
    fingerprint = tokenizer_fingerprint(load_tokenizer(str(tiny_model)))
    arguments = {"model": str(tiny_model), "dtype": "float32", "device": "cpu", "kv_cache_gib": 0.01}
    plain = make_engine(ServeSettings.model_validate(arguments))
    request = Request([70, 71, 72], SamplingParams(max_new_tokens=40, ignore_eos=True), Speculation(method="rest"))
    vanilla = Request(request.prompt, request.params, Speculation(method="vanilla"))
    answer = plain.generate([vanilla])[0].token_ids
    write_corpus(tmp_path, [[70, 71, 72, *answer]], BuildParameters())
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["tokenizer"]["fingerprint"] = fingerprint
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    settings = ServeSettings.model_validate(arguments | {"corpus": str(tmp_path), "method": "rest"})
    engine = make_engine(settings)
    warm_up(engine, settings)
    output = engine.generate([request])[0]
    assert output.token_ids == answer
    assert output.stats.accepted["corpus"] > 10


def test_a_corpus_of_another_tokenizer_is_refused(tiny_model, tmp_path):
    write_corpus(tmp_path, [np.arange(50).tolist()], BuildParameters())
    arguments = {"model": str(tiny_model), "dtype": "float32", "device": "cpu", "kv_cache_gib": 0.01}
    with pytest.raises(CorpusError, match="tokenizer"):
        make_engine(ServeSettings.model_validate(arguments | {"corpus": str(tmp_path)}))
