"""A record that goes on after its run was killed is one record: each iteration once, and every sum as without it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from recorded import EPOCH, begin, finish, host, iterate, left_alone, rows_of, summary_of

from cos598d.comm.ledger import Row
from cos598d.errors import UserError
from cos598d.measure import attempts, row_files, thinning
from cos598d.measure.attempts import why
from cos598d.measure.record import RunRecord
from cos598d.records.conventions import SILENT
from cos598d.world import exit as leaving


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


TIMES = ("attempts", "memory")  # which differ from run to run


@pytest.mark.parametrize("saved", [1, 2, 3, EPOCH, EPOCH + 2])
@pytest.mark.parametrize("lost", [0, 3])
def test_a_resumed_record_is_that_of_the_run_that_nothing_stopped(saved, lost, tmp_path):
    whole = begin(tmp_path / "whole", 2)
    iterate_all(whole, 1, 15)
    finish(whole)

    records = begin(tmp_path / "cut", 2)
    iterate_all(records, 1, saved)
    positions = positions_of(records)
    iterate_all(records, saved + 1, saved + lost)
    left_alone(records)
    with (tmp_path / "cut" / "live" / "iterations.rank1.jsonl").open("a") as rows:
        rows.write('{"iteration": 9')  # killed while it wrote
    records = begin(tmp_path / "cut", 2, positions)
    assert [record.remark for record in records] == [None, None]
    iterate_all(records, saved + 1, 15)
    finish(records)

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


def test_what_rows_that_are_left_out_add_up_to_survives_a_kill(tmp_path, monkeypatch):
    """Of rank 1 five rows are written, and of the ledger none; the summary is that of a run that keeps all."""
    monkeypatch.setattr(thinning, "MOST_ROWS", 10)
    whole = begin(tmp_path / "whole", 2, kept="all")
    iterate_all(whole, 1, 15)
    finish(whole)
    records, folder = begin(tmp_path / "cut", 2, kept="totals"), tmp_path / "cut"
    iterate_all(records, 1, 8)
    positions = positions_of(records)
    iterate_all(records, 9, 10)
    left_alone(records)
    records = begin(folder, 2, positions, kept="totals")
    iterate_all(records, 9, 15)
    finish(records)
    assert [len(rows_of(folder / f"iterations.rank{rank}.jsonl")) for rank in range(2)] == [15, 5]
    expected, found = (summary_of(tmp_path / name) for name in ("whole", "cut"))
    assert found["ledger"].pop("kept") != expected["ledger"].pop("kept")
    assert found["ledger"].pop("rows_kept") == [0, 0] != expected["ledger"].pop("rows_kept")
    assert {k: v for k, v in found.items() if k not in TIMES} == {k: v for k, v in expected.items() if k not in TIMES}


def test_ranks_may_come_and_go_between_attempts(tmp_path):
    """4 ranks, then 2, then 3: every iteration once in rank 0's rows, and in others' while they were there."""
    positions, begun = None, 1
    for ranks, saved, killed in ((4, 4, 5), (2, 8, 10), (3, 12, 12)):
        records = begin(tmp_path, ranks, positions)
        iterate_all(records, begun, saved)
        positions, begun = positions_of(records), saved + 1
        if killed > saved:
            iterate_all(records, begun, killed)
            left_alone(records)
    finish(records)
    there = {
        rank: [row["iteration"] for row in rows_of(tmp_path / f"iterations.rank{rank}.jsonl")] for rank in range(4)
    }
    assert there == {
        0: list(range(1, 13)),
        1: list(range(1, 13)),
        2: [1, 2, 3, 4, 9, 10, 11, 12],
        3: [1, 2, 3, 4],
    }
    summary = summary_of(tmp_path)
    for epoch in summary["epochs"]:
        own = range(EPOCH * (epoch["epoch"] - 1) + 1, EPOCH * epoch["epoch"] + 1)
        for rank in range(4):
            calls = rows_of(tmp_path / f"communication.rank{rank}.jsonl")
            assert epoch["predicted_bytes_sent"][rank] == sum(c["bytes_sent"] for c in calls if c["iteration"] in own)
    assert [one["ranks"] for one in summary["attempts"]] == [4, 2, 3]
    assert [one["lost_iterations"] for one in summary["attempts"]] == [1, 2, 0]
    assert not (tmp_path / "live").exists()


def test_a_rank_that_was_lost_before_a_checkpoint_knew_it_has_no_rows(tmp_path):
    records = begin(tmp_path, 2)
    iterate_all(records, 1, 3)
    positions = positions_of(records)
    left_alone(records)
    records = begin(tmp_path, 4, positions)
    iterate_all(records, 4, 5)
    left_alone(records)
    records = begin(tmp_path, 2, positions)
    iterate_all(records, 4, 4)
    finish(records)
    assert not list(tmp_path.glob("*.rank[23].jsonl"))


def test_a_run_goes_on_in_another_folder_with_the_rows_of_the_first(tmp_path):
    (old, new) = tmp_path / "old", tmp_path / "new"
    records = begin(old, 2)
    iterate_all(records, 1, 4)
    positions = positions_of(records)
    iterate_all(records, 5, 5)
    left_alone(records)
    before = {path.name: path.read_bytes() for path in (old / "live").iterdir()}
    records = begin(new, 2, positions, resumed_from=old)
    iterate_all(records, 5, 6)
    finish(records)
    assert [row["iteration"] for row in rows_of(new / "iterations.rank1.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert [one["lost_iterations"] for one in summary_of(new)["attempts"]] == [1, 0]
    assert {path.name: path.read_bytes() for path in (old / "live").iterdir()} == before


def test_a_record_that_was_published_can_still_go_on(tmp_path):
    """Killed between its rows' taking their names and the summary's, or asked for more epochs."""
    records = begin(tmp_path, 1)
    iterate(records[0], 1, 6)
    positions = positions_of(records)
    finish(records)
    records = begin(tmp_path, 1, positions)
    assert records[0].remark is None
    iterate(records[0], 7, 12)
    finish(records)
    assert summary_of(tmp_path)["iterations"] == 12
    assert len(summary_of(tmp_path)["epochs"]) == 2
    assert [one["why"] for one in summary_of(tmp_path)["attempts"]] == ["finished", "finished"]


@pytest.mark.parametrize("damage", ["gone", "short", "another run's"])
def test_rows_that_are_gone_are_told_and_those_that_are_there_are_kept(damage, tmp_path):
    records = begin(tmp_path, 1)
    iterate(records[0], 1, 5)
    positions = positions_of(records)
    left_alone(records)
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


def test_what_was_done_before_kill_9_is_there_to_the_last_row(tmp_path):
    code = KILLED.format(root=str(Path(__file__).parents[1]), tests=str(Path(__file__).parent), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    live = tmp_path / "live"
    assert [row["iteration"] for row in rows_of(live / "iterations.rank0.jsonl")] == [1, 2, 3, 4]
    assert len(rows_of(live / "communication.rank0.jsonl")) == 4 + 2 + 3 + 2 + 3
    (attempt,) = json.loads((live / "attempts.json").read_text())["attempts"]
    assert (attempt["ended"], attempt["why"]) == (None, None)


def test_what_ended_a_run_is_written_down(tmp_path):
    from cos598d.errors import UserError

    with pytest.raises(UserError), RunRecord(tmp_path / "a", 0) as record:  # noqa: PT012
        iterate(record, 1, 2)
        raise UserError("rank 1 was lost.")
    with RunRecord(tmp_path / "b", 0) as record:
        iterate(record, 1, 3)
        record.ends("stopped by SIGTERM")
    found = [json.loads((tmp_path / name / "live" / "attempts.json").read_text())["attempts"][0] for name in "ab"]
    assert [(one["why"], one["to_iteration"]) for one in found] == [("rank 1 was lost.", 2), ("stopped by SIGTERM", 3)]
    assert all(one["ended"] >= one["begun"] for one in found)


def test_what_a_process_says_when_it_leaves_is_why_its_attempt_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(leaving, "_listeners", [])
    monkeypatch.setattr(os, "_exit", lambda code: None)
    for name, steps in (("some", 2), ("none", 0)):
        with pytest.raises(RuntimeError), RunRecord(tmp_path / name, 0) as record:  # noqa: PT012
            iterate(record, 1, steps)
            raise RuntimeError("Connection closed by peer")
    leaving.exit_now(1, "lost rank 2,\nwhich ended.", 1)
    (attempt,) = json.loads((tmp_path / "some" / "live" / "attempts.json").read_text())["attempts"]
    assert (attempt["why"], attempt["to_iteration"]) == ("lost rank 2, which ended.", 2)
    assert not list((tmp_path / "none").iterdir())  # nothing was done there


def test_what_a_process_says_counts_also_while_another_thread_writes_down_an_error(tmp_path, monkeypatch):
    """The watchdog's thread ends the process while the main thread closes the record for a broken collective."""
    monkeypatch.setattr(leaving, "_listeners", [])
    monkeypatch.setattr(os, "_exit", lambda code: None)
    ending = threading.Thread(target=leaving.exit_now, args=(1, "lost rank 2.", 1))
    write = attempts.write_json

    def write_slowly(path, value):
        text = json.loads(json.dumps(value))
        if value["attempts"][0]["why"] and not ending.ident:
            ending.start()
            ending.join(0.5)
        write(path, text)

    with pytest.raises(RuntimeError), RunRecord(tmp_path, 0) as record:  # noqa: PT012
        iterate(record, 1, 2)
        monkeypatch.setattr(attempts, "write_json", write_slowly)
        raise RuntimeError("Read error: Connection reset by peer")
    ending.join()
    (attempt,) = json.loads((tmp_path / "live" / "attempts.json").read_text())["attempts"]
    assert attempt["why"] == "lost rank 2."


def test_a_run_that_did_nothing_leaves_nothing(tmp_path):
    with RunRecord(tmp_path, 0) as record:
        record.describe({"config.json": {}}, {})
        assert (tmp_path / "live" / "config.json").exists()
    assert not list(tmp_path.iterdir())


def test_rows_are_on_the_disk_before_a_checkpoint_that_speaks_of_them_is_whole(tmp_path, monkeypatch):
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
def test_why_an_attempt_ended_is_a_line_of_what_was_said(error, words):
    assert why(error) == words


def test_what_travels_after_a_checkpoint_is_in_the_last_row_once_however_often_the_run_goes_on(tmp_path):
    """A run stops before the average that settles its epoch, goes on twice from there, and once with fewer ranks."""
    records = begin(tmp_path, 2)
    iterate_all(records, 1, 5)
    positions = positions_of(records)
    left_alone(records)
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
