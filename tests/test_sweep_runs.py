"""`sweep` and `strategies` with real runs: killed and stopped calls that resume, runs that fail, records, tables."""

import json
import os
import re
import shutil
import signal

import pytest
from programs import TINY, children_of, is_alive, wait_until, worker_of_rank
from test_cluster import needs_cluster

from cos598d.tools.cluster import network

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
SMALL = ["--task_name", "digits", "--max_train_examples", "32", "--max_eval_examples", "20", "--num_train_epochs", "2"]
# 40 epochs of 3 iterations each: seconds, of which most are for evaluation and printing.
MANY = ["--world_size", "2", "--max_train_examples", "48", "--max_eval_examples", "8", "--epochs", "40", "--no_cuda"]
LINE = re.compile(r"^\[(\d)/(\d)\] (\S+): (.*)$", re.MULTILINE)


@pytest.fixture
def call(start):
    """call(command, *words): start a command of ours, under another name each time."""
    calls = []

    def _call(*words):
        calls.append(words)
        return start(f"call{len(calls)}", ["-m", "cos598d", *words])

    return _call


@pytest.fixture
def sweep(call, tmp_path):
    """sweep(grid, words, *flags): start a sweep in one folder, once more each time; `grid` is a list of axes."""

    def _sweep(grid, words, *flags):
        axes = [word for axis in grid for word in ("--grid", axis)]
        return call("sweep", *axes, "--runs_dir", tmp_path / "sweep", *flags, "--", "train", *words)

    return _sweep


@pytest.fixture
def table(call, tmp_path):
    """table(strategies, *words): start the table of strategies in one folder, once more each time."""

    def _table(names, *words):
        return call("strategies", *TINY, *MANY, "--strategies", names, "--runs_dir", tmp_path / "table", *words)

    return _table


def read(path):
    return json.loads(path.read_text())


def outcomes(path):
    """The outcome of each run by its label, from the state in a folder's file."""
    state = read(path)
    return {label: row["outcome"] for label, row in state.get("combinations", state).items()}


def rows_of(text):
    """The printed table of strategies, the cells of each row by its strategy."""
    lines = text[text.index("\nstrategy ") + 1 :].partition("\n\n")[0].splitlines()
    return {line.split()[0]: line.split() for line in lines if not line.startswith("--")}


def code_after(program, number):
    """The exit code of a command that gets this signal; none of the processes that it started is left."""
    started = children_of(program.process.pid)
    assert len(started) >= 3  # the starter and its workers
    program.process.send_signal(number)
    code = program.wait()
    wait_until(lambda: not any(is_alive(process) for process in started))
    assert "Traceback" not in program.text, program.text
    return code


@pytest.mark.long
def test_a_sweep_makes_records_a_table_and_a_page_and_a_second_call_repeats_them(sweep, tmp_path):
    grid = ["setup=1x1,1x2", "batch=4"]
    first = sweep(grid, SMALL, "--parallel", "2")
    assert first.wait() == 0, first.text
    lines = LINE.findall(first.text)
    labels = ["setup1x1-batch4-seed42", "setup1x2-batch4-seed42"]
    assert sorted(line[2] for line in lines) == labels
    numbers = r"acc 0\.\d{4}, validation_loss \d\.\d{4}, loss \d\.\d{4}, \S+ s per epoch; \S+ s in all"
    for _, of, _, words in lines:
        assert of == "2"
        assert re.match(numbers, words)
    assert re.search(r"about \S+ (s|min) left$", first.text, re.MULTILINE)
    assert "2 runs at a time share this machine" in first.text
    for label, ranks, batch in zip(labels, (1, 2), (4, 8), strict=True):
        summary = read(tmp_path / "sweep" / label / "summary.json")
        assert (summary["world_size"], summary["total_train_batch_size"], summary["label"]) == (ranks, batch, label)
        assert "epoch 2:" in (tmp_path / "sweep" / "logs" / f"{label}.txt").read_text()
    assert "<svg" in (tmp_path / "sweep" / "report.html").read_text()
    assert "\n| setup | batch |" in (tmp_path / "sweep" / "table.md").read_text()

    table = first.text[first.text.index("\n\n") :]
    assert "The runs ran up to 2 at a time" in table
    second = sweep(grid, SMALL)
    assert second.wait() == 0, second.text
    assert second.text.count("finished before: acc ") == 2
    assert second.text[second.text.index("\n\n") :] == table
    other = sweep([*grid[:1], "batch=4,8"], SMALL)
    assert other.wait() == 2
    assert "(the axis batch: 4 there, 4,8 here). Give the same arguments again" in other.text


def test_a_run_that_fails_is_a_row_and_the_others_are_made(sweep, tmp_path):
    model = tmp_path / "model"
    grid = [f"model_name_or_path={model},tiny"]
    words = [*TINY[2:], "--max_train_examples", "16", "--max_eval_examples", "8", "--num_train_epochs", "1"]
    first = sweep(grid, words, "--seeds", "1")
    assert first.wait() == 1, first.text
    failed, made = LINE.findall(first.text)
    assert "it failed with exit code" in failed[3]
    assert str(model) in failed[3]
    assert failed[3].endswith(f"{failed[2]}.txt")
    assert made[2] == "model_name_or_pathtiny-seed42"
    assert outcomes(tmp_path / "sweep" / "sweep.json") == {failed[2]: "failed", made[2]: "finished"}
    assert f"model_name_or_path {model}, seed 42 failed: it failed with exit code" in first.text
    assert "Traceback" not in first.text
    second = sweep(grid, words)
    assert second.wait() == 1, second.text
    assert f"[1/2] {failed[2]}: run again, since it failed with exit code" in second.text
    assert f"[2/2] {made[2]}: finished before" in second.text


@pytest.mark.long
def test_a_killed_or_stopped_sweep_leaves_no_process_and_resumes(sweep, tmp_path):
    grid = ["setup=1x2", "learning_rate=1e-3,2e-3"]
    # Some seconds of steps, of which no epoch's end saves anything.
    words = [*SMALL[:-1], "40", "--do_train", "--total_train_batch_size", "8"]
    names = [f"setup1x2-learning_rate{rate}-seed42" for rate in ("1e-3", "2e-3")]
    logs = [tmp_path / "sweep" / "logs" / f"{name}.txt" for name in names]
    state = tmp_path / "sweep" / "sweep.json"

    def killed_in(log, number):
        call = sweep(grid, words)
        wait_until(lambda: log.exists() and "iteration 4:" in log.read_text() or call.process.poll() is not None)
        assert call.process.poll() is None, call.text
        return code_after(call, number)

    assert killed_in(logs[0], signal.SIGKILL) == -9
    assert outcomes(state) == {names[0]: "broken off"}
    assert killed_in(logs[1], signal.SIGTERM) == 143
    assert outcomes(state) == {names[0]: "finished", names[1]: "broken off"}
    last = sweep(grid, words)
    assert last.wait() == 0, last.text
    assert f"[1/2] {names[0]}: finished before" in last.text
    assert f"[2/2] {names[1]}: run again, since it was broken off." in last.text
    assert set(outcomes(state).values()) == {"finished"}
    for name, log in zip(names, logs, strict=True):
        summary = read(tmp_path / "sweep" / name / "summary.json")
        assert len(summary["attempts"]) == 2  # it resumed, and did not start again
        assert len(summary["losses"]) == 40 * 4
        assert log.read_text().count("$ ") == 2
        assert not (tmp_path / "sweep" / name / "checkpoints").exists()


@pytest.mark.long
def test_a_run_with_a_damaged_record_is_run_again(sweep, tmp_path):
    words = [*SMALL, "--max_steps", "2"]
    assert sweep(["setup=1x1"], words).wait() == 0
    summary = tmp_path / "sweep" / "setup1x1-seed42" / "summary.json"
    summary.write_text(summary.read_text()[:50])
    again = sweep(["setup=1x1"], words)
    assert again.wait() == 0, again.text
    assert "[1/1] setup1x1-seed42: run again, since" in again.text
    assert "summary.json is not JSON" in again.text
    assert len(read(summary)["losses"]) == 2


# By command: its words, and what it prints when its first run has begun.
BEGUN = {"sweep": ([["batch=4"], [*SMALL[:-1], "300"]], r"\[1/1\]"), "table": (["zero1"], "iteration 1:")}


@pytest.mark.parametrize("command", BEGUN)
def test_two_calls_do_not_work_in_one_folder(command, request):
    again, (words, begun) = request.getfixturevalue(command), BEGUN[command]
    first = again(*words)
    first.wait_for(begun)
    second = again(*words)
    assert second.wait() == 1
    assert "is in use by another run. Choose another folder" in second.text
    assert "--runs_dir" in second.text
    first.process.terminate()
    assert first.wait() == 143


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("env"), reason="needs env")
def test_a_template_starts_the_ranks(sweep, tmp_path):
    template = "env -u NOTHING {command} --world_size {world_size}"
    call = sweep(["setup=1x2"], [*SMALL, "--max_steps", "2"], "--launch", template)
    assert call.wait() == 0, call.text
    assert read(tmp_path / "sweep" / "setup1x2-seed42" / "summary.json")["world_size"] == 2
    assert "$ env -u NOTHING " in (tmp_path / "sweep" / "logs" / "setup1x2-seed42.txt").read_text()


@pytest.mark.long
@pytest.mark.root
@needs_cluster
def test_a_set_up_of_several_hosts_is_an_emulated_cluster_with_the_delay(sweep, tmp_path):
    call = sweep(["setup=1x1,2x1", "delay=0,2ms"], [*SMALL, "--max_steps", "3"], "--rate", "100mbit")
    assert call.wait() == 0, call.text
    assert "delay means nothing to 1x1" in call.text
    folders = {"setup2x1-delay0-seed42": "0", "setup2x1-delay2ms-seed42": "2ms"}
    for name, delay in folders.items():
        network_of_it = read(tmp_path / "sweep" / name / "environment.json")["network"]
        assert network_of_it == {"hosts": 2, "rate": "100mbit", "delay": delay, "offload": "on"}
    assert sorted(outcomes(tmp_path / "sweep" / "sweep.json")) == ["setup1x1-seed42", *folders]
    assert not any(re.match(rf"sweep{call.process.pid}x", space) for space in network.namespaces())


@pytest.mark.long
def test_a_killed_rank_is_a_failed_row_and_a_second_call_runs_it_again(table):
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
def test_a_stopped_table_leaves_no_process_and_a_second_call_resumes(table, tmp_path, number, code, words):
    first = table("zero1,zero2")
    first.wait_for("zero1: 2 ranks, 40 epochs[^$]*iteration 4:")
    assert code_after(first, number) == code, first.text
    assert words in first.text.splitlines()[-1]
    assert outcomes(tmp_path / "table" / "strategies.json") == {"zero1-e40": "broken off"}
    if number == signal.SIGKILL:  # what the next call finds is the same after all of them
        second = table("zero1,zero2")
        second.wait_for("zero1: 2 ranks, 40 epochs: run again, since it was broken off")
        second.process.terminate()
        assert second.wait() == 143


@pytest.mark.long
def test_the_table_has_squad_s_scores(table, tmp_path):
    squad = ("--task_name", "squad", "--version_2_with_negative", "--max_seq_length", "96")
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
