"""A run's record: rows are appended and cut, and every sum is that of its rows. Imports the record's own functions,
since killed and resumed runs on changing ranks would take a minute each as programs."""

import math
import subprocess
import sys
from functools import partial

import pytest
from ranks import world
from recording import EPOCH, NUMBERS, alone, record_run, rows_of, summary_of

from cos598d.errors import UserError
from cos598d.measure.claim import claim_folder
from cos598d.records.conventions import (
    COMMUNICATION,
    EPOCHS,
    EVALUATION,
    GRADIENTS,
    HOST,
    ITERATIONS,
    LOSS,
    WARM_UP,
)
from cos598d.records.figures import summarize_seconds
from cos598d.records.schema import Iteration, read_rows
from cos598d.records.unfinished import is_unfinished, read_summary

SIZE = 4 * NUMBERS
TIMED = ("second", "phases", "wall", "attempts", "counted", "wire", "memory", "unfinished")


@pytest.fixture(scope="module")
def ranks():
    with world(3) as started:
        yield started


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    """A run of 12 iterations on 3 ranks, from its start to its end."""
    folder = tmp_path_factory.mktemp("whole")
    train(ranks, str(folder), 12)
    return folder


def train(ranks, *arguments, count=None, **keywords):
    """`record_run` on these ranks."""
    ranks.run(partial(record_run, *arguments, **keywords), count=count)


def untimed(value):
    """A summary without what differs between two equal runs."""
    if isinstance(value, dict):
        return {k: untimed(v) for k, v in value.items() if not any(word in k for word in TIMED)}
    return [untimed(each) for each in value] if isinstance(value, list) else value


def test_each_sum_of_the_summary_is_that_of_the_rows(whole):
    summary, rows = summary_of(whole), [rows_of(whole, ITERATIONS, rank) for rank in range(3)]
    assert summary["losses"] == [1 / iteration for iteration in range(1, 13)]
    assert summary["iterations"] == 12
    for rank in range(3):
        for name in ("bytes_sent", "bytes_received"):
            mean = sum(row[name] for row in rows[rank]) / 12
            assert summary[f"{name}_per_iteration"][rank] == mean
        for purpose in (GRADIENTS, LOSS, EVALUATION):
            sent = sum(row["by_purpose"].get(purpose, [0] * 4)[2] for row in rows[rank])
            assert summary["ledger"]["by_purpose"][purpose]["bytes_sent"][rank] == sent
    for epoch in summary["epochs"]:
        own = [row for row in rows[0] if row["epoch"] == epoch["epoch"]]
        assert epoch["predicted_bytes_sent"][0] == sum(row["predicted_bytes_sent"] for row in own)
        assert epoch["training"]["examples"] == 4 * EPOCH
        assert epoch["training"]["tokens"] == 32 * EPOCH
        assert epoch["training"]["clock_seconds"] == pytest.approx(sum(row["seconds"] for row in own))
    timed = rows[0][WARM_UP:]
    clock, wall = sum(row["seconds"] for row in timed), sum(row["wall_seconds"] for row in timed)
    assert summary["wall"]["examples_per_second_clock"] == pytest.approx(4 * len(timed) / clock)
    assert summary["wall"]["share_off_the_clock"] == pytest.approx(1 - clock / wall)
    forward = [sum(row["seconds_forward"] for row in own[WARM_UP:]) / len(timed) for own in rows]
    assert summary["phases"]["seconds_forward"] == pytest.approx(sum(forward) / 3)


def test_a_step_sends_what_the_formula_says_and_the_kernel_counts(whole):
    both_ways = 2 * 2 / 3
    for rank in range(3):
        rows = rows_of(whole, ITERATIONS, rank)
        for row in rows:
            settled = 4096 if row["iteration"] % EPOCH == 0 else 0
            assert row["bytes_sent"] == pytest.approx(both_ways * (SIZE + settled), abs=2)
            assert row["predicted_bytes_sent"] == pytest.approx(both_ways * (SIZE + settled + 8), abs=4)
        counted, predicted = (sum(row[f"{how}_bytes_sent"] for row in rows) for how in ("counted", "predicted"))
        assert predicted <= counted < 1.05 * predicted
    wire = summary_of(whole)["wire"]
    assert wire["predicted_bytes_sent_per_iteration"][0] <= wire["bytes_sent_per_iteration"][0]


def test_calls_have_rows_of_their_own(whole):
    calls = rows_of(whole, COMMUNICATION, 2)
    assert len(calls) == 2 * 12 + 2 * 2
    first = calls[0]
    assert (first["iteration"], first["op"], first["tensor"]) == (1, "all_reduce", "layer.weight")
    assert min(first["seconds"], first["started"]) > 0
    of_rows = sum(row["bytes_sent"] for row in calls)
    sent = summary_of(whole)["ledger"]["by_purpose"]
    assert of_rows == sum(each["bytes_sent"][2] for each in sent.values())


def test_a_killed_run_has_the_figures_of_its_rows_and_resumed_it_has_those_of_one_never_interrupted(
    ranks, whole, tmp_path
):
    train(ranks, str(tmp_path), 12, stops_after=10)
    assert is_unfinished(tmp_path)
    found, complete = read_summary(tmp_path, unfinished=True), summary_of(whole)
    assert found.unfinished == "ended after 10 iterations without an error (killed, or its host is down)"
    assert found.losses == [1 / iteration for iteration in range(1, 11)]
    sent = [[epoch["predicted_bytes_sent"] for epoch in epochs] for epochs in (found.epochs, complete["epochs"])]
    assert sent[0] == sent[1]
    with pytest.raises(UserError, match=r"has no summary\.json\. Give the folder of a finished run"):
        read_summary(tmp_path)
    train(ranks, str(tmp_path), 12, at=6)
    assert untimed(summary_of(tmp_path)) == untimed(complete)
    for rank in range(3):
        assert [row["iteration"] for row in rows_of(tmp_path, ITERATIONS, rank)] == list(range(1, 13))
        assert len(rows_of(tmp_path, COMMUNICATION, rank)) == len(rows_of(whole, COMMUNICATION, rank))
        host = rows_of(tmp_path, HOST, rank)
        assert all(a["seconds"] <= b["seconds"] for a, b in zip(host, host[1:], strict=False))
    first, second = summary_of(tmp_path)["attempts"]
    assert (first["to_iteration"], first["lost_iterations"], first["why"]) == (10, 4, "ended without a word")
    assert (second["from_iteration"], second["to_iteration"], second["why"]) == (6, 12, "finished")


def test_a_run_may_resume_again_and_on_another_number_of_ranks(ranks, tmp_path):
    train(ranks, str(tmp_path), 12, stops_after=8)
    train(ranks, str(tmp_path), 12, at=5, stops_after=9, count=2)
    assert [row["iteration"] for row in rows_of(tmp_path, ITERATIONS, 2)] == [1, 2, 3, 4, 5]
    train(ranks, str(tmp_path), 12, at=4, count=2)
    summary = summary_of(tmp_path)
    assert summary["losses"] == [1 / iteration for iteration in range(1, 13)]
    first, second = summary["epochs"]
    assert len(first["predicted_bytes_sent"]) == 3
    assert first["predicted_bytes_sent"][2] > 0
    assert second["predicted_bytes_sent"][2] == 0  # this rank was not there any more
    assert len(summary["bytes_sent_per_iteration"]) == 2
    attempts = [
        [one[name] for name in ("ranks", "from_iteration", "to_iteration", "lost_iterations")]
        for one in summary["attempts"]
    ]
    assert attempts == [[3, 0, 8, 4], [2, 5, 9, 4], [2, 4, 12, 0]]
    assert [row["epoch"] for row in rows_of(tmp_path, EPOCHS)] == [1, 2]


def test_a_run_that_starts_over_removes_the_rows_of_the_earlier_one(ranks, tmp_path):
    train(ranks, str(tmp_path), 6)
    (tmp_path / "predictions.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("a user's own")
    train(ranks, str(tmp_path), 5, stops_after=2, count=2)
    assert not (tmp_path / "summary.json").exists()
    assert not (tmp_path / "predictions.json").exists()
    assert not rows_of(tmp_path, ITERATIONS, 2)
    assert [row["iteration"] for row in rows_of(tmp_path, ITERATIONS, 1)] == [1, 2]
    assert (tmp_path / "notes.txt").exists()


def test_the_summary_is_written_last(tmp_path):
    with pytest.raises(OSError, match="File exists"):
        alone(record_run, tmp_path, 3, files={"config.json/environment.json": {}})
    assert is_unfinished(tmp_path)
    why = read_summary(tmp_path, unfinished=True).attempts[-1].why
    assert "File exists" in why


def test_a_long_run_keeps_the_rows_of_few_calls(ranks, tmp_path):
    train(ranks, str(tmp_path), 201, counts=False, count=2)
    logged = {row["iteration"] for row in rows_of(tmp_path, COMMUNICATION)}
    assert logged == {*range(1, 21), 100, 200}
    rows = rows_of(tmp_path, ITERATIONS)
    assert {row["iteration"] for row in rows if "spans_seconds" in row} == logged
    assert summary_of(tmp_path)["ledger"]["by_purpose"][LOSS]["calls"] == 201
    assert rows[0]["counted_bytes_sent"] is None
    assert summary_of(tmp_path)["wire"] is None


DAMAGES = {
    "a word for a number": ('"world_size": 3', '"world_size": "three"', r"Expected `int`.*\$\.world_size"),
    "no ranks": ('"world_size": 3', '"world_size": 0', r"Expected `int` >= 1 - at `\$\.world_size`"),
    "a missing field": ('"iterations": 12,', "", "missing required field `iterations`"),
    "not a number": ('"seed": 1', '"seed": NaN', "damaged"),
    "half of it": ("", None, "damaged"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_summary_is_one_sentence(whole, tmp_path, name):
    old, new, said = DAMAGES[name]
    text = (whole / "summary.json").read_text()
    assert old in text
    (tmp_path / "summary.json").write_text(text[: len(text) // 2] if new is None else text.replace(old, new, 1))
    with pytest.raises(UserError, match=said) as caught:
        read_summary(tmp_path)
    assert str(caught.value).endswith("Run it again.")
    assert "\n" not in str(caught.value)


def test_a_damaged_row_is_named_and_one_that_is_being_written_left_out(whole, tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = (whole / ITERATIONS.format(rank=0)).read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:40])
    assert [row.iteration for row in read_rows(path, Iteration)] == [1, 2, 3]
    path.write_bytes(lines[0] + lines[1].replace(b'"loss":0.5', b'"loss":"half"') + lines[2])
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2 is damaged: Expected `float`.*\$\.loss"):
        list(read_rows(path, Iteration))
    assert list(read_rows(tmp_path / "nothing.jsonl", Iteration)) == []


def test_the_interval_of_the_mean_is_students():
    from scipy import stats

    seconds = [9.0, 8.0, 1.0, 1.2, 0.9, 1.1, 1.3]
    found, counted = summarize_seconds(seconds), seconds[WARM_UP:]
    low, high = stats.t.interval(0.95, len(counted) - 1, loc=sum(counted) / len(counted), scale=stats.sem(counted))
    assert found["interval_95"] == pytest.approx([low, high])
    assert (found["first"], found["counted"], found["median"]) == (9.0, 5, 1.1)
    assert summarize_seconds([1.0])["mean"] is None
    assert math.isclose(summarize_seconds([1, 1, 2])["mean"], 2)


def refuses(folder, overwrite, says):
    with pytest.raises(UserError, match=says), claim_folder(folder, overwrite):
        pass


def test_a_folder_has_one_run_at_a_time_and_is_not_overwritten_by_accident(tmp_path):
    folder = tmp_path / "run"
    code = (
        "import sys, pathlib; from cos598d.measure.claim import claim_folder\n"
        "with claim_folder(pathlib.Path(sys.argv[1]), overwrite=True):\n    print('mine', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"mine\n"
        refuses(folder, True, r"is in use by another run\. Choose another folder\.")
        other.kill()  # the kernel drops its lock
    alone(record_run, folder, 4, stops_after=2)
    refuses(folder, False, r"has an unfinished run\. Resume it with --resume auto, start over with")
    with claim_folder(folder, overwrite=True):
        pass
    refuses(folder / "setting.json", False, r"is a file\. Give a folder\.")
