"""A run's record as it grows: its figures, rows, disk errors, folder and wall time."""

import errno
import gc
import json
import os
import statistics
import time
import tracemalloc

import numpy as np
import pytest
from recorded import SETTING, add_iteration, begin, finish, iterate, rows_of, summary_of
from report_records import write_run

from cos598d.data.encoders import TextEncoder, word_pieces
from cos598d.data.examples import Images, encode
from cos598d.data.samples import vocabulary
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
from cos598d.tools.report.load import load_run
from cos598d.tools.report.table import comparison, speed_rows


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


def test_forged_sums_are_numbers_and_no_traceback():
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


def test_rows_can_be_read_during_the_run_and_are_renamed_not_copied(tmp_path):
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
def test_files_have_the_rights_of_the_user_s_umask(umask, file_mode, folder_mode, tmp_path):
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "file", "")
        with whole_folder(tmp_path / "folder"):
            pass
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"file": file_mode, "folder": folder_mode}


def test_an_old_folder_stays_until_the_new_one_is_complete(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "old").write_text("")
    with pytest.raises(FileNotFoundError), whole_folder(folder) as new:
        (new / "a folder that is not there" / "new").write_text("")
    assert [path.name for path in folder.iterdir()] == ["old"]
    with whole_folder(folder) as new:
        (new / "new").write_text("")
        assert (folder / "old").exists()
    assert [path.name for path in folder.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_an_error_of_the_disk_names_the_final_file(tmp_path, monkeypatch):
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


def test_rows_wait_while_the_disk_is_full_and_none_is_lost(tmp_path, monkeypatch):
    disk = Full(monkeypatch, 1000)
    path = tmp_path / "live" / "iterations.rank0.jsonl"
    with RunRecord(tmp_path, 0) as record:
        iterate(record, 1, 20)
        assert path.stat().st_size + (tmp_path / "live" / "communication.rank0.jsonl").stat().st_size == 1000
        disk.has_room = True
        iterate(record, 21, 21)
        assert [row["iteration"] for row in rows_of(path)] == list(range(1, 22))


@pytest.mark.parametrize("most", [10**9, 2000])
def test_rows_that_do_not_fit_are_named_and_an_earlier_summary_stays(most, tmp_path, monkeypatch):
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
def test_an_earlier_record_is_removed_only_when_the_new_one_is_on_the_disk(refused, tmp_path, monkeypatch):
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


def test_a_folder_belongs_to_one_run_until_it_ends(tmp_path):
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
    with whole_folder(folder) as new:
        for name in ("manifest", "weights"):
            (new / name).write_text("whole")
        remove_unfinished()


def test_a_folder_that_is_being_removed_is_not_renamed(tmp_path, monkeypatch):
    """The watchdog's thread ends the process while another is about to rename what it has written."""
    monkeypatch.setattr(files.shutil, "rmtree", lambda place, **_: (place / "manifest").unlink(missing_ok=True))
    with pytest.raises(FileNotFoundError):
        end_meanwhile(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_unfinished_files_are_removed_at_the_end(tmp_path):
    with pytest.raises(FileNotFoundError):
        end_meanwhile(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


# Wall time next to the clock's: recording between two iterations is part of it, an evaluation is not.


@pytest.fixture
def host(monkeypatch):
    """The host's clock, moved by hand."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_recording_is_off_the_clock_and_on_the_wall(tmp_path, host):
    """Two epochs of 4 iterations of 8 examples, each 0.05 s, and 0.002 s to record each; 5 s of evaluation."""
    record = RunRecord(tmp_path, 0).__enter__()
    for epoch in (1, 2):
        for number in range(1, 5):
            record.begin_training()
            host[0] += 0.05
            add_iteration(record, 4 * (epoch - 1) + number, epoch, 0.05)
            host[0] += 0.002
        record.pause_training()
        host[0] += 5.0
        record.epoch({"epoch": epoch, "iterations": 4, "loss": 0.5})
    finish([record])
    rows = rows_of(tmp_path / "iterations.rank0.jsonl")
    assert [round(row["wall_seconds"], 6) for row in rows] == [0.05, 0.052, 0.052, 0.052] * 2
    for row in rows_of(tmp_path / "epochs.jsonl"):
        training = row["training"]
        assert training["clock_seconds"] == pytest.approx(4 * 0.05)
        assert training["wall_seconds"] == pytest.approx(4 * 0.052)
        assert training["examples_per_second_wall"] == pytest.approx(8 / 0.052)
    wall = summary_of(tmp_path)["wall"]
    # Iterations 3 to 8: all but the first of an epoch have recorded the one before.
    assert wall["examples_per_second_clock"] == pytest.approx(160)
    assert wall["examples_per_second_wall"] == pytest.approx(6 * 8 / (6 * 0.05 + 5 * 0.002))
    assert wall["share_off_the_clock"] == pytest.approx(5 * 0.002 / (6 * 0.05 + 5 * 0.002))


def test_a_copy_after_an_evaluation_is_in_the_next_iteration_s_wall_time(tmp_path, run_here):
    words = ["--model_name_or_path", "vit-tiny", "--task_name", "digits", "--do_train", "--max_train_examples", 32]
    words += ["--total_train_batch_size", 32, "--num_train_epochs", 3, "--save_steps", 1, "--no_cuda"]
    code, said = run_here("task1/run_glue.py", [*words, "--output_dir", tmp_path / "run"])
    assert code in (0, None), said
    rows = rows_of(tmp_path / "run" / "iterations.rank0.jsonl")
    assert [row["seconds_checkpoint"] > 0 for row in rows] == [False, True, True]
    assert all(row["wall_seconds"] >= row["seconds"] for row in rows)


def test_an_epoch_counts_its_tokens_over_a_resume(tmp_path, host):
    """Three iterations of 8 examples and 100 tokens, a second each; the second goes on from where the first was."""

    def second(record, iteration):
        record.begin_training()
        host[0] += 1.0
        add_iteration(record, iteration, 1, 1.0, {"tokens": 100})

    with RunRecord(tmp_path, 0) as record:
        second(record, 1)
        position = record.position()
    with RunRecord(tmp_path, 0, resume=[position]) as record:
        for iteration in (2, 3):
            second(record, iteration)
        record.pause_training()
        record.epoch({"epoch": 1, "iterations": 3, "loss": 0.5})
        training = record.epochs[0]["training"]
    assert (training["examples"], training["tokens"]) == (24, 300)
    assert training["tokens_per_second_wall"] == pytest.approx(100)


def test_both_speeds_are_next_to_each_other_and_an_older_record_has_none(tmp_path):
    new, old = (load_run(write_run(tmp_path / name)) for name in ("new", "old"))
    new["wall"] = {"examples_per_second_clock": 160.0, "examples_per_second_wall": 154.9, "share_off_the_clock": 0.032}
    assert speed_rows([old]) == []
    head, row = speed_rows([new, old])
    assert dict(zip(head, row, strict=True)) == {
        "run": "new", "examples/s": "160", "examples/s (wall clock)": "154.9", "share not timed": "3.2%",
    }  # fmt: skip
    new["operations"] = {"per_example": 2e9, "peak_per_second": 1e12, "share_of_peak": 0.32}
    assert speed_rows([new, old])[0][-1] == "of the peak"
    assert speed_rows([new, old])[1][-1] == "32%"
    new["repeat_of"] = None
    assert "examples/s (wall clock)" in comparison([new, old], each=True)
    assert "examples/s (wall clock)" not in comparison([old])


def test_texts_count_tokens_and_images_count_images():
    encoder = TextEncoder(word_pieces(vocabulary(), lower_case=True))
    texts = encode("texts", [("a", None), ("a sentence", "another")], np.array([0, 1]), encoder, 16)
    tokens = int(texts.collate([0, 1])["attention_mask"].sum())
    assert texts.counts(np.array([0, 1])) == {"tokens": tokens}, "padding is none"
    images = Images(np.zeros((3, 8, 8, 1), np.uint8), np.zeros(3, np.int64), None)
    assert images.counts(np.array([0, 2])) == {"images": 2}
