"""Sweeps that are made: small ones of real runs, one that is killed and goes on, one with a run that fails."""

import json
import re
import shutil
import signal

import pytest
from programs import TINY, children_of, is_alive, wait_until
from test_cluster import needs_cluster

from cos598d.tools.cluster import network

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
SMALL = ["--task_name", "digits", "--max_train_examples", "32", "--max_eval_examples", "20", "--num_train_epochs", "2"]
LINE = re.compile(r"^\[(\d)/(\d)\] (\S+): (.*)$", re.MULTILINE)


@pytest.fixture
def sweep(start, tmp_path):
    """sweep(grid, words, *flags): start the command on one folder, once more each time; `grid` is a list of axes."""
    calls = []

    def _sweep(grid, words, *flags):
        calls.append(grid)
        axes = [word for axis in grid for word in ("--grid", axis)]
        return start(
            f"call{len(calls)}",
            ["-m", "cos598d", "sweep", *axes, "--runs_dir", tmp_path / "sweep", *flags, "--", "train", *words],
        )

    return _sweep


def state_of(tmp_path):
    return json.loads((tmp_path / "sweep" / "sweep.json").read_text())


def outcomes(tmp_path):
    return {label: row["outcome"] for label, row in state_of(tmp_path)["combinations"].items()}


@pytest.mark.long
def test_a_grid_becomes_records_a_table_and_a_page_and_a_second_call_only_shows_them(sweep, tmp_path):
    grid = ["setup=1x1,1x2", "batch=4"]
    first = sweep(grid, SMALL, "--parallel", "2")
    assert first.wait() == 0, first.text
    lines = LINE.findall(first.text)
    labels = ["setup1x1-batch4-seed42", "setup1x2-batch4-seed42"]
    assert sorted(line[2] for line in lines) == labels
    for _, of, _, words in lines:
        assert of == "2"
        assert re.match(
            r"acc 0\.\d{4}, validation_loss \d\.\d{4}, loss \d\.\d{4}, \S+ s per epoch; \S+ s in all", words
        )
    assert re.search(r"about \S+ (s|min) left$", first.text, re.MULTILINE)
    assert "2 runs at a time share this machine" in first.text
    for label, ranks, batch in zip(labels, (1, 2), (4, 8), strict=True):
        summary = json.loads((tmp_path / "sweep" / label / "summary.json").read_text())
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


def test_a_run_that_fails_is_noted_and_the_rest_go_on(sweep, tmp_path):
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
    assert outcomes(tmp_path) == {failed[2]: "failed", made[2]: "finished"}
    assert f"model_name_or_path {model}, seed 42 failed: it failed with exit code" in first.text
    assert "Traceback" not in first.text
    second = sweep(grid, words)
    assert second.wait() == 1, second.text
    assert f"[1/2] {failed[2]}: run again, since it failed with exit code" in second.text
    assert f"[2/2] {made[2]}: finished before" in second.text


@pytest.mark.long
def test_one_that_is_killed_or_stopped_leaves_no_process_and_goes_on_where_it_was(sweep, tmp_path):
    grid = ["setup=1x2", "learning_rate=1e-3,2e-3"]
    # Some seconds of steps, of which no epoch's end saves anything.
    words = [*SMALL[:-1], "40", "--do_train", "--total_train_batch_size", "8"]
    names = [f"setup1x2-learning_rate{rate}-seed42" for rate in ("1e-3", "2e-3")]
    logs = [tmp_path / "sweep" / "logs" / f"{name}.txt" for name in names]

    def killed_in(log, number):
        call = sweep(grid, words)
        wait_until(lambda: log.exists() and "iteration 4:" in log.read_text() or call.process.poll() is not None)
        assert call.process.poll() is None, call.text
        started = children_of(call.process.pid)
        assert len(started) >= 3  # the starter and its workers
        call.process.send_signal(number)
        code = call.wait()
        wait_until(lambda: not any(is_alive(process) for process in started))
        assert "Traceback" not in call.text
        return code

    assert killed_in(logs[0], signal.SIGKILL) == -9
    assert outcomes(tmp_path) == {names[0]: "broken off"}
    assert killed_in(logs[1], signal.SIGTERM) == 143
    assert outcomes(tmp_path) == {names[0]: "finished", names[1]: "broken off"}
    last = sweep(grid, words)
    assert last.wait() == 0, last.text
    assert f"[1/2] {names[0]}: finished before" in last.text
    assert f"[2/2] {names[1]}: run again, since it was broken off." in last.text
    assert set(outcomes(tmp_path).values()) == {"finished"}
    for name, log in zip(names, logs, strict=True):
        summary = json.loads((tmp_path / "sweep" / name / "summary.json").read_text())
        assert len(summary["attempts"]) == 2  # it went on, and did not begin anew
        assert len(summary["losses"]) == 40 * 4
        assert log.read_text().count("$ ") == 2
        assert not (tmp_path / "sweep" / name / "checkpoints").exists()


@pytest.mark.long
def test_a_damaged_record_is_made_anew(sweep, tmp_path):
    words = [*SMALL, "--max_steps", "2"]
    assert sweep(["setup=1x1"], words).wait() == 0
    summary = tmp_path / "sweep" / "setup1x1-seed42" / "summary.json"
    summary.write_text(summary.read_text()[:50])
    again = sweep(["setup=1x1"], words)
    assert again.wait() == 0, again.text
    assert "[1/1] setup1x1-seed42: run again, since" in again.text
    assert "summary.json is not JSON" in again.text
    assert len(json.loads(summary.read_text())["losses"]) == 2


def test_two_calls_do_not_work_in_one_folder(sweep, tmp_path):
    first = sweep(["batch=4"], [*SMALL[:-1], "300"])
    first.wait_for(r"\[1/1\]")
    second = sweep(["batch=4"], [*SMALL[:-1], "300"])
    assert second.wait() == 1
    assert "is in use by another run. Choose another folder" in second.text
    first.process.terminate()
    assert first.wait() == 143


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("env"), reason="needs env")
def test_a_template_starts_the_ranks(sweep, tmp_path):
    call = sweep(
        ["setup=1x2"], [*SMALL, "--max_steps", "2"], "--launch", "env -u NOTHING {command} --world_size {world_size}"
    )
    assert call.wait() == 0, call.text
    assert json.loads((tmp_path / "sweep" / "setup1x2-seed42" / "summary.json").read_text())["world_size"] == 2
    assert "$ env -u NOTHING " in (tmp_path / "sweep" / "logs" / "setup1x2-seed42.txt").read_text()


@pytest.mark.long
@pytest.mark.root
@needs_cluster
def test_a_set_up_of_several_hosts_is_an_emulated_cluster_of_the_delay_s_links(sweep, tmp_path):
    call = sweep(["setup=1x1,2x1", "delay=0,2ms"], [*SMALL, "--max_steps", "3"], "--rate", "100mbit")
    assert call.wait() == 0, call.text
    assert "delay means nothing to 1x1" in call.text
    folders = {"setup2x1-delay0-seed42": "0", "setup2x1-delay2ms-seed42": "2ms"}
    for name, delay in folders.items():
        environment = json.loads((tmp_path / "sweep" / name / "environment.json").read_text())
        assert environment["network"] == {"hosts": 2, "rate": "100mbit", "delay": delay, "offload": "on"}
    assert sorted(outcomes(tmp_path)) == ["setup1x1-seed42", *folders]
    assert not any(re.match(rf"sweep{call.process.pid}x", space) for space in network.namespaces())
