"""`compare --assert_equal` tells records that differ by the first place where they do, and refuses damaged ones."""

import json

import pytest
from report_records import write_run, write_unfinished

from cos598d.commands import cli

LOSSES = [0.7, 0.6, 0.5, 0.4, 0.3]


@pytest.fixture
def said(capsys):
    """said(words) -> the exit code, and all that was printed."""

    def _said(*words):
        code = cli.main(["compare", *map(str, words)])
        out, err = capsys.readouterr()
        return code, (out + err).strip()

    return _said


def changed(folder, file, change):
    """Change a JSON file, or the last row of a file of rows, in place; return the folder."""
    path = folder / file
    *rows, last = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    value = json.loads(last)
    change(value)
    path.write_text("\n".join([*rows, json.dumps(value)]) + "\n")
    return folder


def with_totals(folder, sent=100):
    purposes = {"gradients": {"calls": 10, "payload_bytes": 80, "bytes_sent": [80, sent], "bytes_received": [80, 80]}}
    ledger = {"kept": "auto", "rows": [10, 10], "rows_kept": [10, 10], "by_purpose": purposes}
    return changed(folder, "summary.json", lambda summary: summary.update(ledger=ledger))


def test_equal_records_are_equal_whatever_their_seconds(said, tmp_path):
    write_run(tmp_path / "a", losses=LOSSES, host=True)
    write_run(tmp_path / "b", losses=LOSSES, seconds=[9.0, 8.0, 7.0, 6.0, 5.0], wire_share=1.5)
    code, words = said("--assert_equal", tmp_path / "a", tmp_path / "b")
    assert code == 0
    assert words == (
        "a and b are bit-identical: 5 losses; mean loss and acc of 2 epochs; "
        "all iterations, calls and bytes per iteration."
    )


def test_the_first_loss_that_differs_is_named_with_its_iteration_and_within_allows_it(said, tmp_path):
    last_bit = [0.7, 0.6, 0.5000000000000001, 0.4, 0.9]
    runs = write_run(tmp_path / "a", losses=LOSSES), write_run(tmp_path / "b", losses=last_bit)
    code, words = said("--assert_equal", *runs)
    assert code == 1
    assert words.startswith(
        "not equal: the loss of iteration 3 is 0.5 in a and 0.5000000000000001 in b, 1.11e-16 apart"
    )
    code, words = said("--assert_equal", *runs, "--within", "1e-6")
    assert (code, words.partition(" in a")[0]) == (1, "not equal: the loss of iteration 5 is 0.3")
    code, words = said("--assert_equal", *runs, "--within", 0.7)
    assert (code, words.partition(":")[0]) == (0, "a and b are equal within 0.7")


def test_a_run_that_is_shorter_differs_where_it_ends(said, tmp_path):
    runs = write_run(tmp_path / "a", losses=LOSSES), write_run(tmp_path / "b", losses=LOSSES[:3], seconds=[1.0] * 3)
    code, words = said("--assert_equal", *runs)
    assert (code, words) == (1, "not equal: the loss of iteration 4 is 0.4 in a and not there in b.")


def test_a_metric_is_named_with_its_epoch_and_a_total_with_its_rank_and_no_total_is_allowed_to_differ(said, tmp_path):
    a, b = (with_totals(write_run(tmp_path / name)) for name in "ab")
    assert said("--assert_equal", a, b)[0] == 0
    changed(b, "summary.json", lambda summary: summary["epochs"][1].update(acc=0.5))
    assert said("--assert_equal", a, b) == (1, "not equal: epoch 2, acc 0.52 in a and 0.5 in b, 0.02 apart.")
    with_totals(b, sent=101)
    code, words = said("--assert_equal", a, b, "--within", 1)
    assert (code, words) == (
        1,
        "not equal: all calls for gradients, bytes sent by rank 2 100 in a and 101 in b, 1 apart.",
    )
    assert said("--assert_equal", a, b, "--within", 1, "--of", "losses,metrics")[0] == 0


def test_where_nothing_is_told_by_purpose_means_are_compared_and_no_more_is_said_than_that(said, tmp_path):
    a, b = (write_run(tmp_path / name) for name in "ab")
    for folder in (a, b):
        ledger = {"kept": "auto", "rows": [0, 0], "rows_kept": [0, 0], "by_purpose": {}}
        changed(folder, "summary.json", lambda summary, its=ledger: summary.update(ledger=its, bytes_from="counters"))
    code, words = said("--assert_equal", a, b, "--of", "totals")
    assert (code, words) == (
        0,
        "a and b are bit-identical: all iterations, and calls and bytes in the communication log, which does "
        "not have those of all_reduce.",
    )
    changed(b, "summary.json", lambda summary: summary.update(calls_per_iteration=77))
    assert said("--assert_equal", a, b) == (1, "not equal: calls per iteration 2 in a and 77 in b, 75 apart.")


def test_a_further_row_of_an_epoch_is_a_difference(said, tmp_path):
    a, b = (write_run(tmp_path / name) for name in "ab")
    changed(b, "summary.json", lambda summary: summary["epochs"].append({"epoch": 2, "loss": 99.0, "acc": 0.0}))
    code, words = said("--assert_equal", a, b)
    assert code == 1
    assert words.startswith("not equal: epoch 2, row 2 not there in a and {'loss': 99.0")


def test_other_flags_and_other_ground_are_named_and_are_no_difference(said, tmp_path):
    a, b = (write_run(tmp_path / name) for name in "ab")
    changed(b, "config.json", lambda config: config.update(learning_rate=1e-4, output_dir="elsewhere"))
    changed(b, "environment.json", lambda environment: environment.update(threads_per_rank=2))
    attempt = {"begun": "then", "ended": "now", "lost_iterations": 0, "ranks": 2, "why": None}
    attempts = [attempt | {"from_iteration": 0, "to_iteration": 2}, attempt | {"from_iteration": 2, "to_iteration": 5}]
    changed(b, "summary.json", lambda summary: summary.update(data="others", parameters=7, attempts=attempts))
    code, words = said("--assert_equal", a, b)
    assert code == 0
    assert words.endswith(
        "Their settings differ: --learning_rate (5e-05 and 0.0001), data (a sample and others), "
        "parameters (1000 and 7), attempts (1 and 2), threads per rank (1 and 2)."
    )


def test_what_is_unfinished_damaged_or_not_there_is_refused_in_a_sentence(said, tmp_path):
    whole, unfinished = write_run(tmp_path / "whole"), write_unfinished(tmp_path / "unfinished")
    assert said("--assert_equal", whole, unfinished) == (
        1,
        f"error: {unfinished} has no summary.json. Give the folder of a finished run.",
    )
    other = changed(
        write_run(tmp_path / "rows"), "iterations.rank0.jsonl", lambda row: row.update(loss=row["loss"] + 1)
    )
    code, words = said("--assert_equal", whole, other)
    assert code == 1
    assert "does not have the losses of summary.json" in words
    cut = write_run(tmp_path / "cut")
    (cut / "iterations.rank1.jsonl").write_text('{"iteration": 1, "lo')
    code, words = said("--assert_equal", cut, whole)
    assert code == 1
    assert "is damaged: not a complete JSON row" in words
    code, words = said("--assert_equal", whole, tmp_path / "nowhere")
    assert code == 1
    assert "does not exist" in words


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["a", "--assert_equal"], "--assert_equal compares two runs, and 1 were given"),
        (["a", "b", "--assert_equal", "--markdown"], "--markdown is for the table"),
        (["a", "b", "--assert_equal", "--within", "nan"], "--within nan is not valid. Give a number of at least 0."),
        (["a", "b", "--assert_equal", "--within", "-1"], "--within -1 is not valid. Give a number of at least 0."),
        (["a", "b", "--assert_equal", "--of", "losses,bits"], "unknown part 'bits'"),
        (["a", "b", "--within", "1"], "--within is for --assert_equal"),
    ],
)
def test_words_that_do_not_go_together_are_refused(said, tmp_path, words, sentence):
    code, found = said(*words)
    assert (code, found.count("\n")) == (2, 0)
    assert sentence in found
