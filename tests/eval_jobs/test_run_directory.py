"""A run on disk loses nothing and counts nothing twice."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eval_jobs.rows import Divergence, Trace
from eval_jobs.run_directory import RunDirectory, RunError, distinct_runs
from tests.eval_jobs.runs import SETTINGS, row, task


def test_records_come_back_as_they_were(tmp_path):
    run = RunDirectory(tmp_path)
    rich = row(drafted={"context": 3}, accepted={"context": 1}, accepted_depths=[1, 0], part_seconds={"draft": 0.5})
    failed = row(question="2", error="too long", prompt_ids=[])
    trace = Trace(
        "b", "1", 0, "qa", [1, 2], [3, 4], [7], [3, 9, 4, 8], [2.0, 1.0, 5.0, 0.5], [-2], [5], [6, 8], [0.0, 1.5]
    )
    divergence = Divergence("b", "1", 0, "pld", 0, 3, 0.25)
    run.rows.append([failed, rich])
    run.traces.append([trace])
    run.divergences.append([divergence])
    again = RunDirectory(tmp_path)
    assert again.rows.read() == [rich, failed]
    assert again.traces.read() == [trace]
    assert again.divergences.read() == [divergence]


def test_many_small_files_become_few_and_nothing_is_lost(tmp_path):
    run = RunDirectory(tmp_path)
    for i in range(150):
        run.rows.append([row(question=str(i))])
    assert len(list((tmp_path / "rows").iterdir())) < 70
    assert {r.question for r in run.rows.read()} == {str(i) for i in range(150)}


def test_a_kill_between_merging_and_removing_does_no_harm(tmp_path):
    run = RunDirectory(tmp_path)
    run.rows.append([row(question="1"), row(question="2")])
    run.rows.append([row(question="1")])  # as if both a part and what it was merged into were there
    (tmp_path / "rows" / "part-half.tmp").write_bytes(b"half a file")
    assert [r.question for r in run.rows.read()] == ["1", "2"]


def test_a_damaged_file_is_named(tmp_path):
    run = RunDirectory(tmp_path)
    run.rows.append([row()])
    (file,) = (tmp_path / "rows").iterdir()
    file.write_bytes(b"PAR1nonsense")
    with pytest.raises(RunError, match=f"{file.name} is damaged"):
        run.rows.read()


def test_files_of_another_table_are_named(tmp_path):
    run = RunDirectory(tmp_path)
    (tmp_path / "rows").mkdir()
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "rows" / "part-x.parquet")
    with pytest.raises(RunError, match=r"part-x.parquet is none of this table's files"):
        run.rows.read()


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/run"], ["run"]),
        (["a/run", "b/other", "a/../a/run"], ["run", "other"]),
        (["a/run", "b/run", "run"], ["a/run", "b/run", "{}/run"]),
    ],
)
def test_runs_are_told_apart_by_their_names(tmp_path, paths, names):
    runs = distinct_runs([str(tmp_path / path) for path in paths])
    assert [run.name for run in runs] == [name.format(tmp_path.name) for name in names]
    assert len({run.path for run in runs}) == len(names)


def test_tasks_add_up(tmp_path):
    run = RunDirectory(tmp_path)
    assert not run.exists
    run.describe(SETTINGS, [task("1")])
    run.describe(SETTINGS, [task("1"), task("2", answer="3", scoring="number")])
    assert run.settings == SETTINGS
    assert run.tasks == [task("1"), task("2", answer="3", scoring="number")]


def test_a_question_is_not_taken_for_another_of_the_same_name(tmp_path):
    run = RunDirectory(tmp_path)
    run.describe(SETTINGS, [task("1", answer="2", scoring="number")])
    with pytest.raises(RunError, match="another question 1 of"):
        run.describe(SETTINGS, [task("1", answer="10", scoring="number")])
    with pytest.raises(RunError, match="two questions 2 of"):
        run.describe(SETTINGS, [task("2"), task("2")])
    assert run.tasks == [task("1", answer="2", scoring="number")]


def test_what_killed_processes_left_goes(tmp_path):
    run = RunDirectory(tmp_path)
    run.rows.append([row()])
    (tmp_path / "rows" / "part-half.tmp").write_bytes(b"half a file")
    run.describe(SETTINGS, [task("1")])
    assert [file.suffix for file in (tmp_path / "rows").iterdir()] == [".parquet"]


@pytest.mark.parametrize(
    ("name", "content"),
    [("run.json", "5"), ("run.json", '{"a": 1}'), ("tasks.json", "5"), ("tasks.json", '[{"a": 1}]')],
)
def test_damaged_descriptions_are_named(tmp_path, name, content):
    run = RunDirectory(tmp_path)
    run.describe(SETTINGS, [task("1")])
    (tmp_path / name).write_text(content)
    with pytest.raises(RunError, match=f"{name} is damaged"):
        assert run.settings and run.tasks


def test_no_run(tmp_path):
    with pytest.raises(RunError, match="holds no run"):
        _ = RunDirectory(tmp_path / "nowhere").settings


def test_files_of_an_older_run_are_read(tmp_path):
    run = RunDirectory(tmp_path)
    run.rows.append([row(step_seconds=[0.1], drafted={"context": 2})])
    (file,) = (tmp_path / "rows").iterdir()
    pq.write_table(pq.read_table(file).drop_columns(["step_seconds", "accepted"]), file)
    (read,) = run.rows.read()
    assert (read.step_seconds, read.accepted, read.drafted) == ([], {}, {"context": 2})
