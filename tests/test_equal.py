"""`compare --assert_equal` names the first place where two records differ, and refuses damaged ones."""

import pytest
from report_records import edit, update, write_run, write_unfinished

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
    update(folder / "summary.json", ledger={"by_purpose": purposes})


def test_equal_records_are_equal_whatever_their_seconds_and_flags(said, tmp_path):
    write_run(tmp_path / "a", losses=LOSSES)
    write_run(tmp_path / "b", losses=LOSSES, seconds=[9.0, 8.0, 7.0, 6.0, 5.0], wire_share=1.5, config={"seed": 1})
    found = "a and b are bit-identical (5 iterations: losses, metrics, totals)."
    assert said(tmp_path / "a", tmp_path / "b") == (0, found)


def test_the_first_loss_that_differs_is_named_with_its_iteration_and_within_allows_it(said, tmp_path):
    last_bit = [0.7, 0.6, 0.5000000000000001, 0.4, 0.9]
    runs = write_run(tmp_path / "a", losses=LOSSES), write_run(tmp_path / "b", losses=last_bit)
    assert said(*runs) == (1, "not equal: the loss of iteration 3 is 0.5 in a and 0.5000000000000001 in b.")
    assert said(*runs, "--within", "1e-6") == (1, "not equal: the loss of iteration 5 is 0.3 in a and 0.9 in b.")
    assert said(*runs, "--within", 0.7)[1].startswith("a and b are equal within 0.7")


def test_a_run_that_is_shorter_differs_where_it_ends(said, tmp_path):
    runs = write_run(tmp_path / "a", losses=LOSSES), write_run(tmp_path / "b", losses=LOSSES[:3], seconds=[1.0] * 3)
    assert said(*runs) == (1, "not equal: the loss of iteration 4 is 0.4 in a and not there in b.")


def test_a_metric_is_named_with_its_epoch_and_a_total_with_its_rank_and_totals_must_be_equal(said, pair):
    a, b = pair
    for folder in pair:
        with_totals(folder)
    assert said(a, b)[0] == 0
    edit(b / "summary.json", lambda summary: summary["epochs"][1].update(acc=0.5))
    assert said(a, b) == (1, "not equal: epoch 2, acc is 0.52 in a and 0.5 in b.")
    with_totals(b, sent=101)
    assert said(a, b, "--within", 1) == (1, "not equal: calls for gradients, bytes_sent 2 is 100 in a and 101 in b.")
    assert said(a, b, "--within", 1, "--of", "losses,metrics")[0] == 0
    edit(b / "summary.json", lambda summary: summary["epochs"].append({"epoch": 2, "loss": 99.0, "acc": 0.0}))
    assert "epoch 3 is not there in a and {'loss': 99.0, " in said(a, b, "--within", 1)[1]


def test_unfinished_damaged_and_absent_records_are_refused(said, tmp_path, pair):
    whole, cut = pair
    unfinished = write_unfinished(tmp_path / "unfinished")
    (cut / "summary.json").write_text('{"iteration": 1, "lo\n')
    for folder, words in (
        (unfinished, f"error: {unfinished} has no summary.json. Give the folder of a finished run."),
        (cut, "summary.json is damaged: "),
        (tmp_path / "nowhere", "does not exist"),
    ):
        code, found = said(whole, folder)
        assert code == 1
        assert words in found


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["a", "--assert_equal"], "--assert_equal compares two runs, and 1 were given"),
        (["a", "b", "--assert_equal", "--verbose"], "--verbose is for the table"),
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
