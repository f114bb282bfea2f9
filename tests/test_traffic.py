"""`traffic`: an epoch's bytes from records, and the parts of the difference between predicted and counted."""

import pytest
from programs import TINY
from report_records import counted_run, read
from test_cluster import needs_cluster

from cos598d.commands.cli import main
from cos598d.errors import UserError
from cos598d.tools.report.traffic_table import HEADER_BYTES, traffic_table


def row_of(*runs):
    """The cells of the last of these runs' row, all columns, with spaces between them."""
    return traffic_table(runs, markdown=True).splitlines()[1 + len(runs)].strip("| ").replace(" | ", " ")


def test_the_difference_is_other_calls_headers_and_a_rest():
    row = row_of(counted_run())
    headers = 10 * 500 * HEADER_BYTES / 1e6
    assert "20.0 x 2 20.5 x 2 +2.50%" in row
    assert row.endswith(f"0.100 x 2 {headers:.3f} x 2 {0.5 - 0.1 - headers:.3f} x 2 log")


def test_an_engine_that_reports_no_calls_has_only_the_kernel_s_bytes():
    row = row_of(counted_run(bytes_from="counters", bytes_sent_per_iteration=[0, 0]))
    assert row == f"batch8-fp32 8 fp32 - - 10 - - 20.5 x 2 - - {10 * 500 * HEADER_BYTES / 1e6:.3f} x 2 - counters"


def test_ranks_of_one_interface_are_compared_with_the_sum_of_their_predictions():
    epoch = {"iterations": 10, "predicted_bytes_sent": [20_000_000] * 2, "counted_bytes_sent": [41_000_000] * 2}
    one_interface = counted_run(ranks_by_interface=((0, 1),), epochs=[epoch])
    assert "40.0 41.0 +2.50%" in row_of(one_interface)
    assert "the busiest rank sends this much per epoch: 20.0 MB" in " ".join(traffic_table([one_interface]).split())


@pytest.mark.parametrize(
    "changes",
    [
        {"wire": None},
        {"epochs": []},
        {"epochs": [{"iterations": 1, "predicted_bytes_sent": [1, 1], "counted_bytes_sent": [None, None]}]},
    ],
)
def test_a_record_without_counted_bytes_is_named(changes):
    with pytest.raises(UserError, match="batch8-fp32"):
        traffic_table([counted_run(**changes)])


def test_every_setting_is_run_and_its_records_give_the_same_table(start, tmp_path, capsys):
    words = ["--loopback", "--hosts", 2, *TINY[:4], "--max_steps", 2, "--batch_sizes", "8,4", "--runs_dir", "epochs"]
    run = start("traffic", ["-m", "cos598d", "traffic", *words])
    assert run.wait() == 0, run.text
    assert "[2/2] 4 examples per step, fp32" in run.text
    folders = [str(tmp_path / "epochs" / name) for name in ("batch8-fp32", "batch4-fp32")]
    assert main(["traffic", *folders]) == 0
    table = capsys.readouterr().out
    assert table.strip() in run.text
    assert [line.split()[0] for line in table.splitlines() if "-fp32 " in line][-2:] == ["batch8-fp32", "batch4-fp32"]
    (tmp_path / "epochs" / "batch4-fp32" / "summary.json").unlink()
    again = start("again", ["-m", "cos598d", "traffic", *words])
    assert again.wait() == 0, again.text
    assert "[1/2] 8 examples per step, fp32: finished before, not run again" in again.text
    assert "[2/2] 4 examples per step, fp32\n" in again.text
    other = start("other", ["-m", "cos598d", "traffic", *words, "--seed", 7])
    assert other.wait() == 2
    assert "was made by traffic with other arguments (--seed: not given there, 7 here)" in other.text


def test_a_dry_run_lists_each_setting_and_makes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--batch_sizes", "8,4", "--hosts", "2", "--max_train_examples", "16", *TINY[:4], "--no_cuda"]
    assert main(["traffic", *map(str, words), "--parallel", "2", "--dry_run"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("batch")]
    assert [row[:4] for row in rows] == [["batch8-fp32", "1", "2", "2"], ["batch4-fp32", "1", "2", "4"]]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.root
@needs_cluster
def test_settings_in_parallel_have_their_own_hosts(start, tmp_path):
    words = ["--hosts", 2, *TINY[:4], "--max_steps", 2, "--batch_sizes", "8,4", "--runs_dir", "epochs", "--parallel", 2]
    run = start("traffic", ["-m", "cos598d", "traffic", *words])
    assert run.wait() == 0, run.text
    assert "2 runs at a time share this machine" in run.text
    for name in ("batch8-fp32", "batch4-fp32"):
        network = read(tmp_path / "epochs" / name / "environment.json")["network"]
        assert network["hosts"] == 2
        assert (tmp_path / "epochs" / "logs" / f"{name}.txt").read_text().startswith("$ ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--batch_sizes", "64,many"), "'many', which is not a whole number"),
        (("--batch_sizes", "0"), "--batch_sizes 0"),
        (("--precision", "fp8"), "--precision fp8"),
        (("--local_rank", "1"), "needs --world_size"),
        (("--world_size", "3"), "Give --hosts N"),
        (("--loopback", "--parallel", "2"), "would count the others' bytes"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_runs(words, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["traffic", *words]) == 2
    assert sentence in capsys.readouterr().err
