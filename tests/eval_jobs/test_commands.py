"""The command lines, run as users run them, on a tiny model in a directory."""

from __future__ import annotations

import json
import socket

import pytest
import ray

import cluster.__main__ as cluster_command
import eval_jobs.__main__ as eval_command


@pytest.fixture
def bench(tmp_path) -> str:
    path = tmp_path / "bench.jsonl"
    rows = [{"question_id": i, "category": "c", "turns": [f"Say {i} {i} {i} and again {i}", "more"]} for i in range(6)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_compare_prints_the_stable_object(model_dir, bench, capsys):
    arguments = ["compare", "--model", model_dir, "--bench", bench, "--limit", "3", "--dtype", "float32", "--json"]
    assert (
        eval_command.main(
            [*arguments, "--max-new-tokens", "12", "--methods", "hf,hf_pld,vanilla,pld,logitspec", "--ablate"]
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["bench"], result["prompts"], result["dtype"]) == ("bench", 3, "float32")
    assert list(result["methods"]) == ["hf", "hf_pld", "vanilla", "pld", "logitspec"] + [
        f"adaptive-{source}" for source in ("context", "next_next", "successor")
    ]
    for name, figures in result["methods"].items():
        assert figures["identical_to_hf"] == figures["identical_to_vanilla"] == 3, name
        assert figures["worst_divergence_gap"] == 0.0
        assert figures["tokens"] > 0 and figures["tokens_per_s"] > 0
    assert result["methods"]["vanilla"]["mat"] == 1.0
    assert not set(result["methods"]["adaptive-context"]["sources"]) & {"context", "corpus"}
    assert sum(result["methods"]["logitspec"]["time_share"].values()) == pytest.approx(1.0, abs=1e-3)


def test_exactness_finds_everything_identical(model_dir, bench, capsys):
    arguments = ["exactness", "--model", model_dir, "--bench", bench, "--dtype", "float32", "--capacity", "9"]
    assert eval_command.main([*arguments, "--max-new-tokens", "70", "--batch", "3", "--limit", "3"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["identical"].values()) == {3}
    assert len(result["identical"]) == 4 * 4 * 2
    assert result["preemptions"] > 0


def test_generate_writes_a_row_a_prompt(model_dir, bench, tmp_path):
    rows = {}
    for batch in ("1", "4"):
        out = tmp_path / f"out{batch}.jsonl"
        arguments = ["generate", "--model", model_dir, "--prompts", bench, "--out", str(out), "--batch", batch]
        assert cluster_command.main([*arguments, "--max-new-tokens", "9", "--dtype", "float32"]) == 0
        rows[batch] = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in rows["1"]] == [str(i) for i in range(6)]
    assert [row["token_ids"] for row in rows["1"]] == [row["token_ids"] for row in rows["4"]]
    fields = "id prompt_tokens token_ids text finish_reason decode_steps mat ttft_s decode_s"
    assert list(rows["1"][0]) == fields.split()


def test_earlier_rows_are_replaced_when_there_are_new_ones(model_dir, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("earlier rows\n")
    arguments = ["generate", "--prompt", "Hi", "--max-new-tokens", "3", "--out", str(out)]
    assert cluster_command.main([*arguments, "--model", "./nowhere"]) == 2
    assert out.read_text() == "earlier rows\n"
    assert cluster_command.main([*arguments, "--model", model_dir]) == 0
    (line,) = out.read_text().splitlines()
    assert json.loads(line)["token_ids"]


def test_a_single_prompt_is_printed(model_dir, capsys):
    assert cluster_command.main(["generate", "--model", model_dir, "--prompt", "Hi", "--max-new-tokens", "3"]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) <= 3


def test_steps_are_timed_against_the_floor(model_dir, capsys):
    arguments = ["bench-step", "--model", model_dir, "--batch", "1,2", "--width", "1,5", "--context", "20", "--json"]
    assert cluster_command.main([*arguments, "--steps", "2"]) == 0
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])["steps"]
    assert [(m["batch"], m["width"], m["tokens"]) for m in measured] == [(1, 1, 1), (1, 5, 5), (2, 1, 2), (2, 5, 10)]
    assert all(m["step_ms"] > m["floor_ms"] > 0 and abs(sum(m["share"].values()) - 1) < 1e-6 for m in measured)
    assert cluster_command.main(["bench-step", "--model", model_dir, "--width", "none"]) == 2
    assert "--width" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt", ""], "empty"),
        (["--prompt", "half \ud800"], "surrogate"),
        (["--prompt", "x", "--temperature", "-1"], "temperature"),
        (["--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens"),
        (["--prompt", "x", "--capacity", "0"], "capacity"),
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
        (["--prompt", "y" * 600], "shorten"),
        (["--prompt", "x", "--model", "./nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_told_in_a_line(model_dir, capsys, arguments, says):
    assert cluster_command.main(["generate", "--model", model_dir, "--raw", *arguments]) == 2
    captured = capsys.readouterr()
    assert says in captured.err and "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{nope", "line 1"),
        ('{"turns": []}', "turns"),
        ("[1]", "object"),
        ("", "no prompts"),
        ('{"turns": [3]}', "turns"),
    ],
)
def test_broken_prompt_files_name_the_line(model_dir, tmp_path, capsys, content, says):
    path = tmp_path / "broken.jsonl"
    path.write_text(content)
    assert eval_command.main(["compare", "--model", model_dir, "--bench", str(path)]) == 2
    assert says in capsys.readouterr().err


def test_unknown_methods_are_named(model_dir, bench, capsys):
    assert eval_command.main(["compare", "--model", model_dir, "--bench", bench, "--methods", "hf,magic"]) == 2
    assert "magic" in capsys.readouterr().err


def test_a_sweep_on_a_cluster_that_is_not_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    assert eval_command.main(["sweep", "--bench", "own", "--out", str(tmp_path / "run"), "--address", address]) == 2
    assert f"no Ray cluster answers at {address}" in capsys.readouterr().err
