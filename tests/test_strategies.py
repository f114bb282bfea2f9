"""The table of strategies: one command, resumable; what failed is a row that says so, what is missing a sentence."""

import json
import shutil

import pytest
from programs import TINY

from cos598d.commands import cli
from cos598d.commands import strategies as command

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
WORDS = [*TINY, "--world_size", "2", "--max_train_examples", "48", "--max_eval_examples", "16", "--epochs", "2"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A table of one process and zero1 on two ranks, with real runs; and what was said."""
    folder = tmp_path_factory.mktemp("table")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GLUE_DIR", raising=False)
        patch.setenv("COS598D_CACHE", str(folder / "cache"))
        words = [*WORDS, "--strategies", "baseline,zero1,dp", "--no_cuda", "--runs_dir", str(folder / "runs")]
        assert cli.main(["strategies", *words]) == 0
    return folder / "runs"


@pytest.fixture
def again(finished, tmp_path, monkeypatch, capsys):
    """again(names, *words, code=0, last=""): the command on a copy of the table; what it prints, its code, its runs.

    The runs that it starts are not made: each copies the finished zero1's record, or fails with `code` and `last`.
    """
    monkeypatch.delenv("GLUE_DIR", raising=False)
    folder = shutil.copytree(finished, tmp_path / "runs")
    started = []

    def call(names, *words, code=0, last=""):
        started.clear()

        def train(given):
            output = folder / given[given.index("--output_dir") + 1]
            started.append(output.name)
            if not code:
                shutil.copytree(finished / "zero1-e2", output, dirs_exist_ok=True)
            return code, last

        monkeypatch.setattr(command, "_train", train)
        ended = cli.main(["strategies", *WORDS, "--strategies", names, "--runs_dir", str(folder), "--no_cuda", *words])
        said = capsys.readouterr()
        return said.out + said.err, ended, list(started)

    call.folder = folder
    return call


def test_one_command_makes_the_runs_and_they_train_alike(finished):
    losses = [
        json.loads((finished / name / "summary.json").read_text())["losses"] for name in ("baseline-e2", "zero1-e2")
    ]
    assert len(losses[0]) == 6
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    epochs = [json.loads(line) for line in (finished / "zero1-e2" / "epochs.jsonl").read_text().splitlines()]
    assert all(0 < epoch["validation_loss"] < 2 for epoch in epochs)
    page = (finished / "report.html").read_text()
    assert "The strategies at equal total batch" in page
    assert "dp is left out: with fewer than two GPUs" in page
    assert "not the same work" not in page


def test_what_is_finished_is_not_run_again(again):
    text, code, started = again("baseline,zero1")
    assert (code, started) == (0, [])
    assert text.count("finished before, not run again") == 2
    rows = [line.split() for line in text.splitlines() if line.startswith(("strategy ", "baseline ", "zero1 "))]
    head, baseline, zero1 = rows
    assert head[:6] == ["strategy", "ranks", "epochs", "seconds", "s/epoch", "examples/s"]
    assert baseline[1:3] == ["1", "2"]
    assert baseline[6:8] == ["1.00", "100%"]
    assert zero1[1:3] == ["2", "2"]


def test_a_broken_run_is_run_again_and_says_so(again):
    (again.folder / "zero1-e2" / "summary.json").write_text('{"losses": ')
    text, code, started = again("baseline,zero1")
    assert (code, started) == (0, ["zero1-e2"])
    assert "zero1: 2 ranks, 2 epochs: run again, since" in text
    assert "is damaged" in text


def test_a_strategy_that_fails_is_a_row_that_says_so_and_is_run_again(again):
    text, code, started = again("baseline,zero2", code=1, last="rank 1 was lost.")
    assert (code, started) == (1, ["zero2-e2"])
    assert "zero2, 2 epochs: failed with exit code 1: rank 1 was lost." in text
    (row,) = [line.split() for line in text.splitlines() if line.startswith("zero2 ")]
    assert row[:4] == ["zero2", "2", "2", "failed"]
    assert "zero2, 2 epochs: failed" in (again.folder / "report.html").read_text()
    text, code, started = again("baseline,zero2")
    assert (code, started) == (0, ["zero2-e2"])
    assert "zero2: 2 ranks, 2 epochs: run again, since it failed with exit code 1: rank 1 was lost." in text
    assert again("baseline,zero2")[2] == []


def test_a_call_that_was_broken_off_goes_on_where_it_was(again, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(command, "load_run_as", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert again("zero2")[1] == 130
    shutil.rmtree(again.folder / "zero2-e2")
    text, _, started = again("zero2")
    assert started == ["zero2-e2"]
    assert "run again, since it was broken off" not in text  # that run had ended well
    command._say(again.folder, command.Plan("zero3", 2, 2, {}), command.BROKEN_OFF)
    assert "zero3: 2 ranks, 2 epochs: run again, since it was broken off" in again("zero3")[0]


@pytest.mark.parametrize(
    ("names", "words", "sentence"),
    [
        ("baseline", ("--seed", "7"), "is a finished run with seed 42, and 7 is asked for now"),
        ("baseline,nonsense", (), "nonsense"),
        ("zero1:nonsense=1", (), "there is no option 'nonsense'"),
        ("zero1:bucket_mb=x", (), "bucket_mb needs a number, not 'x'"),
        (",", (), "names none"),
        ("dp", (), "no strategy is left to run"),
    ],
)
def test_what_cannot_be_meant_is_said_before_anything_runs(again, names, words, sentence):
    text, code, started = again(names, *words)
    assert sentence in text
    assert code in (1, 2)
    assert started == []


@pytest.mark.parametrize("epochs", ["0", "x", "2,", "nan"])
def test_epochs_are_numbers_above_0(again, epochs):
    text, code, _ = again("baseline", "--epochs", epochs)
    assert code == 2
    assert "give numbers above 0" in text


def test_an_engine_that_is_not_installed_is_left_out_with_what_to_type(again, monkeypatch):
    from importlib.metadata import PackageNotFoundError

    from cos598d.engines import engine

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(engine, "version", missing)
    text, code, started = again("baseline,deepspeed:zero_stage=1")
    assert (code, started) == (0, [])
    assert "deepspeed:zero_stage=1 is left out: --sync deepspeed needs DeepSpeed, which is not installed" in text
    assert "make engines" in text
