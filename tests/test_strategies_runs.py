"""The command that makes the strategies' table, with real runs: a killed rank, signals, SQuAD."""

import json
import os
import signal

import pytest
from programs import TINY, children_of, is_alive, wait_until, worker_of_rank

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
# 40 epochs of 3 iterations each: seconds, of which most are evaluation's and printing's.
WORDS = ("--world_size", "2", "--max_train_examples", "48", "--max_eval_examples", "8", "--epochs", "40", "--no_cuda")


@pytest.fixture
def table(start, tmp_path):
    """table(strategies, *words): start the command on one folder, once more each time."""
    calls = []

    def _table(names, *words):
        calls.append(names)
        words = ["--strategies", names, "--runs_dir", tmp_path / "table", *words]
        return start(f"call{len(calls)}", ["-m", "cos598d", "strategies", *TINY, *WORDS, *words])

    return _table


def rows_of(text):
    """The printed table, the cells of each row by its strategy."""
    lines = text[text.index("\nstrategy ") + 1 :].partition("\n\n")[0].splitlines()
    return {line.split()[0]: line.split() for line in lines if not line.startswith("--")}


@pytest.mark.long
def test_a_killed_rank_is_a_row_and_the_others_go_on_and_a_second_call_makes_what_is_missing(table):
    first = table("zero1,ddp", "--epochs", "20")
    first.wait_for("zero1: 2 ranks, 20 epochs[^$]*iteration 4:")
    os.kill(worker_of_rank(first.process.pid, 1), signal.SIGKILL)
    assert first.wait() == 1, first.text
    rows = rows_of(first.text)
    assert rows["zero1"][:3] == ["zero1", "2", "failed"]
    assert float(rows["ddp"][2]) > 0
    failed = "zero1, 20 epochs: it failed with exit code 137: rank 1 was ended by SIGKILL."
    assert failed in first.text
    assert "rank 0: lost connection to rank 1" in first.text
    assert "Traceback" not in first.text, first.text
    second = table("zero1,ddp", "--epochs", "20")
    assert second.wait() == 0, second.text
    assert "zero1: 2 ranks, 20 epochs: run again, since it failed with exit code 137: rank 1" in second.text
    assert "ddp: 2 ranks, 20 epochs: finished before, not run again" in second.text
    assert failed not in second.text
    assert float(rows_of(second.text)["zero1"][2]) > 0


@pytest.mark.long(one_in=4)
@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "stopped by SIGTERM."),
        (signal.SIGHUP, 129, "stopped by SIGHUP."),
        (signal.SIGKILL, -9, ""),
    ],
)
def test_a_stopped_call_leaves_no_process_and_a_second_one_goes_on(table, tmp_path, number, code, words):
    first = table("zero1,zero2")
    first.wait_for("zero1: 2 ranks, 40 epochs[^$]*iteration 4:")
    started = children_of(first.process.pid)
    assert len(started) >= 3  # the starter and its workers
    first.process.send_signal(number)
    assert first.wait() == code, first.text
    assert words in first.text.splitlines()[-1]
    wait_until(lambda: not any(is_alive(process) for process in started))
    assert "Traceback" not in first.text, first.text
    state = json.loads((tmp_path / "table" / "strategies.json").read_text())
    assert {place: row["outcome"] for place, row in state.items()} == {"zero1-e40": "broken off"}
    if number == signal.SIGKILL:  # what the next call finds is the same after all of them
        second = table("zero1,zero2")
        second.wait_for("zero1: 2 ranks, 40 epochs: run again, since it was broken off")
        second.process.terminate()
        assert second.wait() == 143


def test_two_calls_do_not_work_in_one_folder(table):
    first = table("zero1")
    first.wait_for("iteration 1:")
    second = table("zero1")
    assert second.wait() == 1
    assert "table is in use by another run. Choose another folder." in second.text
    assert "--runs_dir" in second.text


@pytest.mark.long
def test_squad_has_its_scores_in_the_table(table, tmp_path):
    squad = ("--task_name", "squad", "--version_2_with_negative", "--max_seq_length", "64", "--max_query_length", "16")
    call = table("baseline,zero3,dp", *squad, "--precision", "bf16", "--epochs", "1,2", "--max_train_examples", 24)
    assert call.wait() == 0, call.text
    lines = (tmp_path / "table" / "table.md").read_text().splitlines()
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert head[-4:] == ["training loss", "validation_loss", "exact", "f1"]
    runs = ["baseline", "dp", "zero3"]
    assert sorted(row[0] for row in rows) == sorted(2 * runs)
    assert [row[2] for row in rows] == 3 * ["1"] + 3 * ["2"]
    losses = [float(row[-3]) for row in rows[3:] if row[0] != "dp"]
    assert losses == pytest.approx([losses[0]] * 2, rel=2e-2)
    assert call.text[call.text.index("\nstrategy ") :].count("dp is left out: DataParallel needs two GPUs") == 1
    epochs = (tmp_path / "table" / "report.html").read_text().partition("Losses and metrics after each epoch.")[2]
    assert epochs.partition("</table>")[0].count("<tr>") == 1 + 2 * (1 + 2)
