"""What a model string means."""

import pytest

from cluster.models.errors import ModelError
from cluster.models.resolve import EMBEDDED_NAME, SourceKind, resolve


def test_embedded_name():
    source = resolve(EMBEDDED_NAME)
    assert (source.kind, source.name) == (SourceKind.EMBEDDED, EMBEDDED_NAME)


def test_directory_with_config(tmp_path):
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text("{}")
    source = resolve(f"{tmp_path}/my-model/")
    assert (source.kind, source.name) == (SourceKind.DIRECTORY, "my-model")
    assert source.location == str(tmp_path / "my-model")


def test_relative_directory_wins_over_a_hub_id(tmp_path, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "owner" / "name" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/name").kind is SourceKind.DIRECTORY


def test_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve("~").location == str(tmp_path)


def test_gguf_file(tmp_path):
    (tmp_path / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    source = resolve(str(tmp_path / "model.Q4_K_M.gguf"))
    assert (source.kind, source.name) == (SourceKind.GGUF, "model.Q4_K_M")


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B-Instruct", "a/b", "meta-llama/Llama-3.2_1B"])
def test_hub_id(name):
    source = resolve(name)
    assert (source.kind, source.location) == (SourceKind.HUB, name)


@pytest.mark.parametrize("name", ["smollm2", "/no/such/dir", "./here", "a/b/c", "x/y.gguf", "owner/", "-", ""])
def test_unknown_strings_are_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "":
        (tmp_path / "config.json").touch()  # an empty string must not mean the current directory
    with pytest.raises(ModelError, match="no model"):
        resolve(name)


def test_directory_without_config_names_the_gguf_file_in_it(tmp_path):
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(ModelError, match=r"no config\.json.*weights\.gguf"):
        resolve(str(tmp_path))


def test_file_of_another_kind(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r"not a \.gguf file"):
        resolve(str(tmp_path / "model.safetensors"))
