"""The record of a resumed run is one record: each iteration once, and every sum as without the kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from recorded import EPOCH, begin, finish, host, iterate, left_alone, rows_of, summary_of

from cos598d.comm.ledger import Row
from cos598d.errors import UserError
from cos598d.measure import row_files, thinning
from cos598d.measure.attempts import why
from cos598d.measure.record import RunRecord
from cos598d.records.conventions import SILENT


@pytest.fixture(autouse=True)
def _host(monkeypatch):
    """The host's clock, which every iteration moves by its seconds."""
    monkeypatch.setattr(time, "perf_counter", lambda: host[0])
    host[0] = 128.0


def iterate_all(records, first, last):
    for record in records:
        iterate(record, first, last)


def positions_of(records):
    return [json.loads(json.dumps(record.position())) for record in records]


def killed(folder, ranks, saved, lost=0, positions=None, **more):
    """Ranks that are killed `lost` iterations after they saved at iteration `saved`; the positions that they saved."""
    records = begin(folder, ranks, positions, **more)
    iterate_all(records, records[0].iterations + 1, saved)
    found = positions_of(records)
    iterate_all(records, saved + 1, saved + lost)
    left_alone(records)
    return found


def run_to_end(folder, ranks, last, positions=None, **more):
    """The records of ranks that end after iteration `last`."""
    records = begin(folder, ranks, positions, **more)
    iterate_all(records, records[0].iterations + 1, last)
    finish(records)
    return records


TIMES = ("attempts", "memory")  # which differ from run to run


@pytest.mark.parametrize("saved", [1, 2, 3, EPOCH, EPOCH + 2])
@pytest.mark.parametrize("lost", [0, 3])
def test_a_resumed_record_is_that_of_the_run_that_nothing_stopped(saved, lost, tmp_path):
    run_to_end(tmp_path / "whole", 2, 15)
    positions = killed(tmp_path / "cut", 2, saved, lost)
    with (tmp_path / "cut" / "live" / "iterations.rank1.jsonl").open("a") as rows:
        rows.write('{"iteration": 9')  # killed while it wrote
    assert [record.remark for record in run_to_end(tmp_path / "cut", 2, 15, positions)] == [None, None]

    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == sorted(
        path.name for path in (tmp_path / "whole").iterdir()
    )
    for path in (tmp_path / "whole").glob("*.jsonl"):
        assert rows_of(tmp_path / "cut" / path.name) == rows_of(path), path.name
    expected, found = (summary_of(tmp_path / name) for name in ("whole", "cut"))
    assert {k: v for k, v in found.items() if k not in TIMES} == {k: v for k, v in expected.items() if k not in TIMES}
    assert [one["why"] for one in expected["attempts"]] == ["finished"]
    first, second = found["attempts"]
    assert (first["from_iteration"], first["to_iteration"], first["lost_iterations"]) == (0, saved + lost, lost)
    assert (first["why"], first["ranks"]) == (SILENT, 2)
    assert (second["from_iteration"], second["to_iteration"], second["lost_iterations"]) == (saved, 15, 0)


def test_sums_of_rows_that_are_not_kept_survive_a_kill(tmp_path, monkeypatch):
    """Of rank 1 five rows are written, and of the ledger none; the summary is that of a run that keeps all."""
    monkeypatch.setattr(thinning, "MOST_ROWS", 10)
    run_to_end(tmp_path / "whole", 2, 15, kept="all")
    folder = tmp_path / "cut"
    positions = killed(folder, 2, 8, 2, kept="totals")
    run_to_end(folder, 2, 15, positions, kept="totals")
    assert [len(rows_of(folder / f"iterations.rank{rank}.jsonl")) for rank in range(2)] == [15, 5]
    expected, found = (summary_of(tmp_path / name) for name in ("whole", "cut"))
    assert found["ledger"].pop("kept") != expected["ledger"].pop("kept")
    assert found["ledger"].pop("rows_kept") == [0, 0] != expected["ledger"].pop("rows_kept")
    assert {k: v for k, v in found.items() if k not in TIMES} == {k: v for k, v in expected.items() if k not in TIMES}


def test_ranks_may_come_and_go_between_attempts(tmp_path):
    """4 ranks, then 2, then 3: every iteration once in rank 0's rows, and in others' while they were there."""
    positions = killed(tmp_path, 4, 4, 1)
    positions = killed(tmp_path, 2, 8, 2, positions)
    run_to_end(tmp_path, 3, 12, positions)
    there = [[row["iteration"] for row in rows_of(tmp_path / f"iterations.rank{rank}.jsonl")] for rank in range(4)]
    assert there == [[*range(1, 13)], [*range(1, 13)], [1, 2, 3, 4, 9, 10, 11, 12], [1, 2, 3, 4]]
    summary = summary_of(tmp_path)
    for epoch in summary["epochs"]:
        own = range(EPOCH * (epoch["epoch"] - 1) + 1, EPOCH * epoch["epoch"] + 1)
        for rank in range(4):
            calls = rows_of(tmp_path / f"communication.rank{rank}.jsonl")
            assert epoch["predicted_bytes_sent"][rank] == sum(c["bytes_sent"] for c in calls if c["iteration"] in own)
    assert [one["ranks"] for one in summary["attempts"]] == [4, 2, 3]
    assert [one["lost_iterations"] for one in summary["attempts"]] == [1, 2, 0]
    assert not (tmp_path / "live").exists()


def test_a_rank_that_was_lost_before_its_first_checkpoint_has_no_rows(tmp_path):
    positions = killed(tmp_path, 2, 3)
    killed(tmp_path, 4, 5, positions=positions)
    run_to_end(tmp_path, 2, 4, positions)
    assert not list(tmp_path.glob("*.rank[23].jsonl"))


def test_a_run_resumed_in_another_folder_has_the_rows_of_the_first(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    positions = killed(old, 2, 4, 1)
    before = {path.name: path.read_bytes() for path in (old / "live").iterdir()}
    run_to_end(new, 2, 6, positions, resumed_from=old)
    assert [row["iteration"] for row in rows_of(new / "iterations.rank1.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert [one["lost_iterations"] for one in summary_of(new)["attempts"]] == [1, 0]
    assert {path.name: path.read_bytes() for path in (old / "live").iterdir()} == before


def test_a_published_record_can_be_resumed(tmp_path):
    """Killed between its rows' taking their names and the summary's, or asked for more epochs."""
    records = begin(tmp_path, 1)
    iterate_all(records, 1, 6)
    positions = positions_of(records)
    finish(records)
    (record,) = run_to_end(tmp_path, 1, 12, positions)
    assert record.remark is None
    assert summary_of(tmp_path)["iterations"] == 12
    assert len(summary_of(tmp_path)["epochs"]) == 2
    assert [one["why"] for one in summary_of(tmp_path)["attempts"]] == ["finished", "finished"]


@pytest.mark.parametrize("damage", ["gone", "short", "another run's"])
def test_missing_rows_are_remarked_and_the_others_are_kept(damage, tmp_path):
    positions = killed(tmp_path, 1, 5)
    path = tmp_path / "live" / "iterations.rank0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    if damage == "gone":
        path.unlink()
    else:
        text = "".join(lines[:3]) + lines[3][:9] if damage == "short" else "x" * 9999
        path.write_text(text)
    with RunRecord(tmp_path, 0, resume=positions) as record:
        assert record.remark == f"some rows of the first 5 iterations are missing in {tmp_path}."
        assert record.iterations == 5
        iterate(record, 6, 7)
        expected = [1, 2, 3, 5, 6, 7] if damage == "short" else [5, 6, 7]  # the checkpoint has row 5
        assert [row["iteration"] for row in rows_of(path)] == expected
        record.stage({}, [record.share()], {})


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [{root!r}, {tests!r}]
import recorded
from cos598d.measure.record import RunRecord
with RunRecord(Path({folder!r}), 0) as record:
    recorded.iterate(record, 1, 4)
    print("there", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_9_loses_no_row(tmp_path):
    code = KILLED.format(root=str(Path(__file__).parents[1]), tests=str(Path(__file__).parent), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    live = tmp_path / "live"
    assert [row["iteration"] for row in rows_of(live / "iterations.rank0.jsonl")] == [1, 2, 3, 4]
    assert len(rows_of(live / "communication.rank0.jsonl")) == 4 + 2 + 3 + 2 + 3
    (attempt,) = json.loads((live / "attempts.json").read_text())["attempts"]
    assert (attempt["ended"], attempt["why"]) == (None, None)


def test_an_attempt_has_the_reason_of_its_end(tmp_path):
    with pytest.raises(UserError), RunRecord(tmp_path / "a", 0) as record:  # noqa: PT012
        iterate(record, 1, 2)
        raise UserError("rank 1 was lost.")
    with RunRecord(tmp_path / "b", 0) as record:
        iterate(record, 1, 3)
        record.ends("stopped by SIGTERM")
    found = [json.loads((tmp_path / name / "live" / "attempts.json").read_text())["attempts"][0] for name in "ab"]
    assert [(one["why"], one["to_iteration"]) for one in found] == [("rank 1 was lost.", 2), ("stopped by SIGTERM", 3)]
    assert all(one["ended"] >= one["begun"] for one in found)


def test_a_run_that_did_nothing_leaves_nothing(tmp_path):
    with RunRecord(tmp_path, 0) as record:
        record.describe({"config.json": {}}, {})
        assert (tmp_path / "live" / "config.json").exists()
    assert not list(tmp_path.iterdir())


def test_rows_are_on_the_disk_before_their_checkpoint_is_complete(tmp_path, monkeypatch):
    """By descriptors of their own, so that the training may write meanwhile."""
    synced = []
    path_of = "/proc/self/fd/{}".format
    monkeypatch.setattr(row_files, "sync_to_disk", lambda descriptor: synced.append(os.readlink(path_of(descriptor))))
    monkeypatch.setattr(row_files, "sync_folder", lambda path: synced.append(str(path)))
    with RunRecord(tmp_path, 0) as record:
        iterate(record, 1, 4)
        sizes = record.position()["files"]
        record.to_disk()
    folder = str(tmp_path / "live")
    assert {f"{folder}/{name}" for name in sizes} | {folder} <= set(synced)
    assert synced[-1] == folder, "the names come last"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (None, "ended before its work was done"),
        (UserError("--data_dir none: there is no such folder."), "--data_dir none: there is no such folder."),
        (KeyError(), "KeyError"),
        (
            RuntimeError(
                "[/built/in/gloo/pair.cc:537] Read error: Connection reset by peer. This is typically caused by X"
            ),
            "RuntimeError: Read error: Connection reset by peer",
        ),
    ],
)
def test_why_is_one_line_of_an_error(error, words):
    assert why(error) == words


def test_bytes_after_a_checkpoint_are_in_the_last_row_once_over_many_resumes(tmp_path):
    """A run stops before the average that settles its epoch, goes on twice from there, and once with fewer ranks."""
    positions = killed(tmp_path, 2, 5)
    rows = {rank: tmp_path / "live" / f"iterations.rank{rank}.jsonl" for rank in range(2)}
    before = {rank: rows_of(rows[rank]) for rank in rows}
    for _ in range(2):
        records = begin(tmp_path, 2, positions)
        for record in records:
            assert record.remark is None
            record.begin_training()
            record.ledger.enter(Row(5, "gradients", "broadcast", "settled", (10,), "float32", 40, 3, 2, 0.1))
            record.pause_training()
            last = rows_of(rows[record.rank])[-1]
            for name, more in {"calls": 1, "bytes_sent": 3, "predicted_bytes_received": 2}.items():
                assert last[name] == before[record.rank][-1][name] + more
        left_alone(records)
    (record,) = begin(tmp_path, 1, positions)
    assert rows_of(rows[1]) == before[1]
    left_alone([record])
