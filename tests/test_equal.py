"""`compare --assert_equal` names the first place where two records differ, and refuses damaged ones."""

import pytest
from report_records import attempt, edit, read, update, write_rows, write_run, write_unfinished

from cos598d.commands import cli

LOSSES = [0.7, 0.6, 0.5, 0.4, 0.3]


@pytest.fixture
def said(capsys):
    """said(words) -> the exit code, and all that `compare --assert_equal` prints."""

    def _said(*words):
        code = cli.main(["compare", "--assert_equal", *map(str, words)])
        out, err = capsys.readouterr()
        return code, (out + err).strip()

    return _said


@pytest.fixture
def pair(tmp_path):
    """Two equal records, a and b."""
    return [write_run(tmp_path / name) for name in "ab"]


def with_totals(folder, sent=100):
    purposes = {"gradients": {"calls": 10, "payload_bytes": 80, "bytes_sent": [80, sent], "bytes_received": [80, 80]}}
    ledger = {"kept": "auto", "rows": [10, 10], "rows_kept": [10, 10], "by_purpose": purposes}
    update(folder / "summary.json", ledger=ledger)


def test_equal_records_are_equal_whatever_their_seconds(said, tmp_path):
    write_run(tmp_path / "a", losses=LOSSES, host=True)
    write_run(tmp_path / "b", losses=LOSSES, seconds=[9.0, 8.0, 7.0, 6.0, 5.0], wire_share=1.5)
    code, words = said(tmp_path / "a", tmp_path / "b")
    assert (code, words.partition(":")[0]) == (0, "a and b are bit-identical")
    assert all(what in words for what in ("5 losses", "acc of 2 epochs", "calls and bytes per iteration"))


def test_the_first_loss_that_differs_is_named_with_its_iteration_and_within_allows_it(said, tmp_path):
    last_bit = [0.7, 0.6, 0.5000000000000001, 0.4, 0.9]
    runs = write_run(tmp_path / "a", losses=LOSSES), write_run(tmp_path / "b", losses=last_bit)
    code, words = said(*runs)
    assert code == 1
    assert "the loss of iteration 3 is 0.5 in a and 0.5000000000000001 in b, 1.11e-16 apart" in words
    code, words = said(*runs, "--within", "1e-6")
    assert (code, words.partition(" in a")[0]) == (1, "not equal: the loss of iteration 5 is 0.3")
    code, words = said(*runs, "--within", 0.7)
    assert (code, words.partition(":")[0]) == (0, "a and b are equal within 0.7")


def test_a_run_that_is_shorter_differs_where_it_ends(said, tmp_path):
    runs = write_run(tmp_path / "a", losses=LOSSES), write_run(tmp_path / "b", losses=LOSSES[:3], seconds=[1.0] * 3)
    code, words = said(*runs)
    assert code == 1
    assert "the loss of iteration 4 is 0.4 in a and not there in b" in words


def test_a_metric_is_named_with_its_epoch_and_a_total_with_its_rank_and_totals_must_be_equal(said, pair):
    a, b = pair
    for folder in pair:
        with_totals(folder)
    assert said(a, b)[0] == 0
    edit(b / "summary.json", lambda summary: summary["epochs"][1].update(acc=0.5))
    assert said(a, b) == (1, "not equal: epoch 2, acc 0.52 in a and 0.5 in b, 0.02 apart.")
    with_totals(b, sent=101)
    code, words = said(a, b, "--within", 1)
    assert code == 1
    assert "for gradients, bytes sent by rank 2 100 in a and 101 in b, 1 apart" in words
    assert said(a, b, "--within", 1, "--of", "losses,metrics")[0] == 0


def test_without_totals_by_purpose_the_means_are_compared(said, pair):
    a, b = pair
    ledger = {"kept": "auto", "rows": [0, 0], "rows_kept": [0, 0], "by_purpose": {}}
    for folder in pair:
        update(folder / "summary.json", ledger=ledger, bytes_from="counters")
    code, words = said(a, b, "--of", "totals")
    assert code == 0
    assert words.startswith("a and b are bit-identical: all iterations, and calls and bytes in the communication log")
    assert "the communication log, which does not have those of all_reduce" in words
    assert "loss" not in words
    update(b / "summary.json", calls_per_iteration=77)
    assert said(a, b) == (1, "not equal: calls per iteration 2 in a and 77 in b, 75 apart.")


def test_a_further_row_of_an_epoch_is_a_difference(said, pair):
    a, b = pair
    edit(b / "summary.json", lambda summary: summary["epochs"].append({"epoch": 2, "loss": 99.0, "acc": 0.0}))
    code, words = said(a, b)
    assert code == 1
    assert "epoch 2, row 2 not there in a and {'loss': 99.0" in words


def test_other_flags_and_another_machine_are_named_and_are_no_difference(said, pair):
    a, b = pair
    update(b / "config.json", learning_rate=1e-4, output_dir="elsewhere")
    update(b / "environment.json", threads_per_rank=2)
    attempts = [attempt(to_iteration=2), attempt(from_iteration=2)]
    update(b / "summary.json", data="others", parameters=7, attempts=attempts)
    code, words = said(a, b)
    assert code == 0
    assert words.partition("settings differ: ")[2].rstrip(".").split(", ") == [
        *("--learning_rate (5e-05 and 0.0001)", "data (a sample and others)", "parameters (1000 and 7)"),
        *("attempts (1 and 2)", "threads per rank (1 and 2)"),
    ]


def test_unfinished_damaged_and_absent_records_are_refused(said, tmp_path, pair):
    whole, cut = pair
    other, unfinished = write_run(tmp_path / "rows"), write_unfinished(tmp_path / "unfinished")
    *rows, last = read(other / "iterations.rank0.jsonl")
    write_rows(other / "iterations.rank0.jsonl", [*rows, last | {"loss": last["loss"] + 1}])
    (cut / "iterations.rank1.jsonl").write_text('{"iteration": 1, "lo')
    for folder, words in (
        (unfinished, f"error: {unfinished} has no summary.json. Give the folder of a finished run."),
        (other, "does not have the losses of summary.json"),
        (cut, "is damaged: not a complete JSON row"),
        (tmp_path / "nowhere", "does not exist"),
    ):
        code, found = said(whole, folder)
        assert code == 1
        assert words in found


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
def test_words_that_do_not_go_together_are_refused(capsys, words, sentence):
    assert cli.main(["compare", *words]) == 2
    found = capsys.readouterr().err
    assert found.count("\n") == 1
    assert sentence in found
