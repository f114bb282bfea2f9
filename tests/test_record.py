"""A run's record while it grows: visible, flat in memory, not copied, whole or not there, and one run's alone."""

import errno
import gc
import json
import os
import statistics
import tracemalloc

import pytest
from recorded import SETTING, begin, finish, iterate, rows_of, summary_of

from cos598d.errors import UserError
from cos598d.measure.claim import claim_folder
from cos598d.measure.record import RunRecord
from cos598d.records.conventions import PHASES, WARM_UP
from cos598d.records.figures import (
    RankSums,
    epoch_traffic,
    epoch_training,
    run_figures,
    summarize_seconds,
    wire_figures,
)
from cos598d.terminal import files
from cos598d.terminal.files import remove_unfinished, whole_file, whole_folder, write_whole


def test_the_summary_s_figures_are_those_of_the_rows(tmp_path):
    (record,) = begin(tmp_path)
    iterate(record, 1, 11)
    finish([record], SETTING, {"config.json": {"seed": 1}})
    summary, rows = summary_of(tmp_path), rows_of(tmp_path / "iterations.rank0.jsonl")
    calls = [call for call in rows_of(tmp_path / "communication.rank0.jsonl") if call["purpose"] == "gradients"]
    counted = rows[WARM_UP:]  # of bytes and calls all are
    assert summary["losses"] == [row["loss"] for row in rows]
    assert summary["seconds_per_iteration"] == summarize_seconds([row["seconds"] for row in rows])
    for phase in PHASES:
        name = f"seconds_{phase}"
        assert summary["phases"][name] == pytest.approx(statistics.fmean(row[name] for row in counted), rel=1e-14)
    by_iteration = [[call for call in calls if call["iteration"] == row["iteration"]] for row in rows]
    assert summary["calls_per_iteration"] == statistics.fmean(map(len, by_iteration))
    for name in ("bytes_sent", "bytes_received"):
        sums = [sum(call[name] for call in of_one) for of_one in by_iteration]
        assert summary[f"{name}_per_iteration"] == [statistics.fmean(sums)]
    assert json.loads((tmp_path / "config.json").read_text()) == {"seed": 1}


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_run_of_few_iterations_has_figures_too(count, tmp_path):
    with RunRecord(tmp_path, 0) as record:
        iterate(record, 1, count)
        sums = RankSums(record.share()["sums"])
    assert sums.mean("calls") == {0: 0, 1: 3, 2: 2.5}[count]
    mean = sum(100 + 3 * iteration for iteration in range(1, count + 1)) / 1024 / 3 / max(1, count)
    assert sums.mean_seconds("seconds_data") == (None if count == 0 else pytest.approx(mean))


def test_sums_that_a_forged_checkpoint_has_are_numbers_and_no_traceback():
    sums = RankSums({"1": [{}, {"counted": 2}], "2": [{}, {}]})
    assert epoch_traffic([sums, RankSums()], 1)["predicted_bytes_sent"] == [0, 0]
    assert epoch_traffic([sums], 2) == {}
    assert epoch_training(sums.epoch(1))["examples_per_second_wall"] is None
    assert wire_figures([sums], [["eth0", [0]]])["bytes_sent_per_iteration"] == [0]
    assert run_figures([sums], [], [])["phases"]["seconds_data"] is None


def test_an_iteration_leaves_nothing_in_memory(tmp_path):
    with RunRecord(tmp_path, 0) as record:
        iterate(record, 1, 50, epoch=1000)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            iterate(record, 51, 1550, epoch=2000)
            gc.collect()  # tuples that Python keeps at hand
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
    assert grown < 5000, "3 bytes of an iteration"


def test_rows_can_be_read_while_the_run_goes_on_and_take_their_name_without_being_copied(tmp_path):
    names = ("iterations.rank0.jsonl", "communication.rank0.jsonl")
    (record,) = begin(tmp_path)
    for last in range(1, 4):
        iterate(record, last, last)
        rows = rows_of(tmp_path / "live" / names[0])
        assert [row["iteration"] for row in rows] == list(range(1, last + 1))
    numbers = [(tmp_path / "live" / name).stat().st_ino for name in names]
    finish([record])
    assert [(tmp_path / name).stat().st_ino for name in names] == numbers
    assert {path.name for path in tmp_path.iterdir()} == {*names, "summary.json", "epochs.jsonl"}


@pytest.mark.parametrize(("umask", "file_mode", "folder_mode"), [(0o077, 0o600, 0o700), (0o022, 0o644, 0o755)])
def test_files_have_the_rights_that_the_user_s_umask_leaves(umask, file_mode, folder_mode, tmp_path):
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "file", "")
        with whole_folder(tmp_path / "folder"):
            pass
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"file": file_mode, "folder": folder_mode}


def test_an_old_folder_stands_until_the_new_one_is_whole(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "old").write_text("")
    with pytest.raises(FileNotFoundError), whole_folder(folder) as beside:
        (beside / "a folder that is not there" / "new").write_text("")
    assert [path.name for path in folder.iterdir()] == ["old"]
    with whole_folder(folder) as beside:
        (beside / "new").write_text("")
        assert (folder / "old").exists()
    assert [path.name for path in folder.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_an_error_of_the_disk_names_the_file_that_the_user_knows(tmp_path, monkeypatch):
    monkeypatch.setattr("cos598d.terminal.files._create", lambda name: os.open("/dev/full", os.O_WRONLY))
    with pytest.raises(OSError, match="No space left") as error, whole_file(tmp_path / "summary.json") as handle:
        handle.write("x")
    assert error.value.filename == str(tmp_path / "summary.json")


class Full:
    """A disk that takes so many bytes and then is full, until it `has_room`."""

    def __init__(self, monkeypatch, left):
        self.left, self.has_room, self._write = left, False, os.write
        monkeypatch.setattr("cos598d.measure.row_files.os.write", self.write)

    def write(self, descriptor, data):
        taken = len(data) if self.has_room else min(len(data), self.left)
        if data and not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.left -= taken
        return self._write(descriptor, data[:taken])


def test_rows_wait_while_the_disk_is_full_and_are_all_there_when_it_is_not(tmp_path, monkeypatch):
    disk = Full(monkeypatch, 1000)
    path = tmp_path / "live" / "iterations.rank0.jsonl"
    with RunRecord(tmp_path, 0) as record:
        iterate(record, 1, 20)
        assert path.stat().st_size + (tmp_path / "live" / "communication.rank0.jsonl").stat().st_size == 1000
        disk.has_room = True
        iterate(record, 21, 21)
        assert [row["iteration"] for row in rows_of(path)] == list(range(1, 22))


@pytest.mark.parametrize("most", [10**9, 2000])
def test_rows_that_do_not_fit_are_named_and_what_stood_there_stands(most, tmp_path, monkeypatch):
    """At the run's end, or as soon as too many wait."""
    (tmp_path / "summary.json").write_text("old")
    Full(monkeypatch, 10)
    monkeypatch.setattr("cos598d.measure.row_files.MOST_WAITING", most)
    done = 0
    with RunRecord(tmp_path, 0) as record, pytest.raises(UserError) as error:  # noqa: PT012
        for done in range(1, 21):
            iterate(record, done, done)
        record.complete()
    assert (done == 20) == (most == 10**9)
    assert "rank0.jsonl cannot be written (No space left on device). " in str(error.value)
    assert "Make room there" in str(error.value)
    assert "an earlier run's files are still there" in str(error.value)
    assert (tmp_path / "summary.json").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"summary.json", "live"}


@pytest.mark.parametrize("refused", ["fsync", "replace"])
def test_an_earlier_record_goes_only_when_the_new_one_has_all_but_its_names(refused, tmp_path, monkeypatch):
    """What a network's disk or a quota refuses is refused late: at fsync, or where a name is given."""
    (tmp_path / "summary.json").write_text("old")

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with RunRecord(tmp_path, 0) as record:
        iterate(record, 1, 3)
        monkeypatch.setattr(os, refused, refuse)
        with pytest.raises(UserError) as error:
            finish([record])
    monkeypatch.undo()
    still = (tmp_path / "summary.json").exists()
    assert still == (refused != "replace")
    rows = (tmp_path / "live" / "iterations.rank0.jsonl").read_text().splitlines()
    assert len(rows) == 3, "what it has done can be looked at all the same"
    assert ("and an earlier run's files are still there." in str(error.value)) == still
    assert ("are incomplete, and the earlier run's are already removed" in str(error.value)) != still
    assert not list(tmp_path.glob(".*"))


def test_a_folder_is_one_run_s_until_it_ends(tmp_path):
    folder = tmp_path / "run"
    with claim_folder(folder, overwrite=False):
        for overwrite in (False, True):
            with pytest.raises(UserError, match="is in use by another run. Choose another folder"):
                claim_folder(folder, overwrite).__enter__()
        # The other ranks of the run that has claimed it only look.
        with claim_folder(folder, overwrite=False, locks=False):
            pass
        (folder / "summary.json").write_text("")
    with claim_folder(folder, overwrite=True):
        pass
    with pytest.raises(UserError, match="is not empty"):
        claim_folder(folder, overwrite=False).__enter__()


def end_meanwhile(folder):
    with whole_folder(folder) as beside:
        for name in ("manifest", "weights"):
            (beside / name).write_text("whole")
        remove_unfinished()


def test_a_folder_that_is_being_removed_can_no_longer_take_its_name(tmp_path, monkeypatch):
    """The watchdog's thread ends the process while another is about to rename what it has written."""
    monkeypatch.setattr(files.shutil, "rmtree", lambda place, **_: (place / "manifest").unlink(missing_ok=True))
    with pytest.raises(FileNotFoundError):
        end_meanwhile(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_what_is_unfinished_is_gone_at_the_end(tmp_path):
    with pytest.raises(FileNotFoundError):
        end_meanwhile(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
