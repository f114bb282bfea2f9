"""compare and report also read the record of a run that is still running or was killed."""

import shutil

import pytest
from recorded import SETTING, begin, finish, iterate, left_alone, summary_of
from report_records import report, write_run

from cos598d.commands.cli import main
from cos598d.errors import UserError
from cos598d.measure.claim import claim_folder
from cos598d.terminal.locks import is_locked, locked
from cos598d.tools.report.load import load_run, load_run_as

TWO = SETTING | {"world_size": 2}


def start(folder):
    ranks = begin(folder, 2)
    files = {"config.json": {"optimizer": "adamw"}, "environment.json": {"processor": "simulated"}}
    ranks[0].describe(files, TWO)
    return ranks


def iterate_all(ranks, first, last):
    for record in ranks:
        iterate(record, first, last, epoch=4)


def leave(ranks, why="rank 1 was lost."):
    ranks[0].ends(why)
    for record in ranks:
        record.__exit__(None, None, None)


def compared(capsys, *words):
    assert main(["compare", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_compare_reads_a_running_run(tmp_path, capsys):
    with claim_folder(tmp_path / "run", overwrite=False):
        ranks = start(tmp_path / "run")
        for last in (1, 2, 6):
            iterate_all(ranks, 1 if last == 1 else ranks[0].iterations + 1, last)
            text = compared(capsys, tmp_path / "run")
            assert f"run is still running, and has done {last} iterations. Its figures are of those." in text
        assert load_run(tmp_path / "run", unfinished=True)["epochs"][0]["acc"] == 0.6
        leave(ranks)
    text = compared(capsys, tmp_path / "run")
    assert "run ended after 6 iterations: rank 1 was lost. Its figures are of those." in text


def test_the_figures_of_an_unfinished_run_are_those_of_its_end(tmp_path):
    ranks = start(tmp_path / "run")
    iterate_all(ranks, 1, 7)
    so_far = load_run(tmp_path / "run", unfinished=True)
    finish(ranks, TWO)
    whole = summary_of(tmp_path / "run")
    names = ["iterations", "losses", "seconds_per_iteration", "phases", "calls_per_iteration", "tensors_per_iteration"]
    names += [f"{name}_per_iteration" for name in ("bytes_sent", "bytes_received", "payload_bytes")]
    assert [name for name in names if so_far[name] != whole[name]] == []


def test_a_report_of_a_killed_run_begins_with_its_end(tmp_path):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    folder = tmp_path / "run"
    leave_as_killed(folder)
    text = report(tmp_path / "page.md", folder).read_text()
    said = "run ended after 5 iterations without an error (killed, or its host is down). Its figures are of those."
    assert said in text
    assert text.index(said) < text.index("## The runs")
    assert "| run | begun | ended | from iteration | to | lost | ranks | why it ended |" in text
    beside = report(tmp_path / "both.md", folder, write_run(tmp_path / "whole")).read_text()
    assert said in beside


def leave_as_killed(folder):
    """Five iterations, the sixth row of rank 0 in part; rank 1 is one behind, and its row in part too."""
    ranks = start(folder)
    iterate_all(ranks, 1, 4)
    iterate_all(ranks[:1], 5, 5)
    left_alone(ranks)
    for name, text in (("iterations.rank0", '{"iteration": 6, "lo'), ("iterations.rank1", '{"it')):
        with (folder / "live" / f"{name}.jsonl").open("a") as rows:
            rows.write(text)


def test_cut_and_missing_rows_of_a_killed_run_are_accepted(tmp_path, capsys):
    leave_as_killed(tmp_path / "run")
    assert "ended after 5 iterations" in compared(capsys, tmp_path / "run")
    (tmp_path / "run" / "live" / "iterations.rank1.jsonl").unlink()
    assert load_run(tmp_path / "run", unfinished=True)["iterations"] == 5
    assert load_run_as(tmp_path / "run", "run", unfinished=True).series.losses.tolist() == [
        1 / (3 + i) for i in range(1, 6)
    ]
    (tmp_path / "run" / "live" / "attempts.json").unlink()
    assert "iterations without an error" in compared(capsys, tmp_path / "run")


def test_damage_within_the_rows_of_a_killed_run_is_named(tmp_path):
    leave_as_killed(tmp_path / "run")
    path = tmp_path / "run" / "live" / "iterations.rank0.jsonl"
    path.write_text(path.read_text().replace('"loss": 0.2,', '"loss": "low",'))
    with pytest.raises(UserError, match=r'live/iterations.rank0.jsonl, line 2 is damaged: its loss is "low"'):
        load_run(tmp_path / "run", unfinished=True)


def test_load_run_refuses_an_unfinished_run_by_default(tmp_path):
    leave_as_killed(tmp_path / "run")
    with pytest.raises(UserError, match=r"has no summary.json. Give the folder of a finished run"):
        load_run(tmp_path / "run")


def test_an_earlier_record_stays_next_to_the_new_run_s_until_it_ends(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    ranks = start(folder)
    iterate_all(ranks, 1, 3)
    assert "ended" not in compared(capsys, folder)
    text = compared(capsys, folder, folder / "live")
    assert "run/live ended after 3 iterations" in text
    leave(ranks)


def test_looking_at_a_folder_does_not_lock_it(tmp_path):
    assert not is_locked(tmp_path)
    with locked(tmp_path) as is_mine:
        assert is_mine
        assert is_locked(tmp_path)
        with locked(tmp_path) as is_mine_too:
            assert not is_mine_too
    assert not is_locked(tmp_path)
    assert not is_locked(tmp_path / "nothing")


def test_unfinished_runs_are_no_repeats(tmp_path, capsys):
    leave_as_killed(tmp_path / "one")
    leave_as_killed(tmp_path / "two")
    text = compared(capsys, tmp_path / "one", tmp_path / "two")
    assert "2 runs" not in text
    assert text.count("ended after 5 iterations") == 2


def test_live_rows_without_a_setting_are_no_record(tmp_path, capsys):
    leave_as_killed(tmp_path / "run")
    shutil.move(tmp_path / "run" / "live" / "setting.json", tmp_path / "setting.json")
    assert main(["compare", str(tmp_path / "run")]) == 1
    assert "has no summary.json" in capsys.readouterr().err
