"""The table of strategies: one command that resumes. A failed or missing strategy is a row with its reason."""

import re
import shutil
from pathlib import Path

import pytest
from programs import TINY, Program
from report_records import edit, read, update

from cos598d.commands import cli
from cos598d.errors import UserError
from cos598d.tools.report.load import load_entry_run
from cos598d.tools.runs import runner
from cos598d.tools.runs.jobs import Ended

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
WORDS = [*TINY, "--world_size", "2", "--max_train_examples", "48", "--max_eval_examples", "16", "--epochs", "2"]


def made_by(train):
    """In place of the runner's programs: `train(words)` gives each one's exit code and its last words."""

    def run_jobs(jobs, parallel, begin, end):
        for job in jobs:
            begin(job)
            code, last = train(job.command[job.command.index("train") + 1 :])
            end(job, Ended(code, last, 1.0, False))

    return run_jobs


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A table of one process and zero1 on two ranks, with real runs, which begin with torch loaded."""
    folder = tmp_path_factory.mktemp("table")

    def train(words):
        program = Program(folder, Path(words[words.index("--output_dir") + 1]).name, ["-m", "cos598d", "train", *words])
        assert program.wait() == 0, program.text
        return 0, ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run_jobs", made_by(train))
        patch.delenv("GLUE_DIR", raising=False)
        patch.setenv("COS598D_CACHE", str(folder / "cache"))
        words = [*WORDS, "--strategies", "baseline,zero1,dp", "--no_cuda", "--runs_dir", str(folder / "runs")]
        assert cli.main(["strategies", *words]) == 0
    return folder / "runs"


@pytest.fixture
def again(finished, tmp_path, monkeypatch, capsys):
    """again(names, *words, code, last, has_page): run it on a copy of the table; what it prints, its code, its runs.

    The runs that it starts are not made: each copies the finished zero1's record, or fails with `code` and `last`.
    """
    monkeypatch.delenv("GLUE_DIR", raising=False)
    monkeypatch.setattr("cos598d.tools.report.disturbed.LEAST_SHARE", 2.0)  # other tests may keep the machine busy
    folder = shutil.copytree(finished, tmp_path / "runs")
    started = []

    def call(names, *words, code=0, last="", has_page=False):
        started.clear()

        def train(given):
            output = folder / given[given.index("--output_dir") + 1]
            started.append(output.name)
            if not code:
                shutil.copytree(finished / "zero1-e2", output, dirs_exist_ok=True)
                say_what_was_asked(output, given)
            return code, last

        monkeypatch.setattr(runner, "run_jobs", made_by(train))
        with pytest.MonkeyPatch.context() as patch:
            if not has_page:  # which takes a second to draw
                patch.setattr("cos598d.commands.strategies.strategies_page", lambda _: None, raising=False)
                patch.setattr("cos598d.commands.strategies.as_html", lambda _: "", raising=False)
            asked = [*WORDS, "--strategies", names, "--runs_dir", str(folder), "--no_cuda", *words]
            ended = cli.main(["strategies", *asked])
        said = capsys.readouterr()
        return said.out + said.err, ended, list(started)

    call.folder = folder
    return call


def say_what_was_asked(folder, words):
    """Let a copied record be of the run that these words ask for."""
    for file in ("config.json", "summary.json"):
        value = read(folder / file)
        for name in ("label", "sync", "compress", "bucket_mb", "num_train_epochs"):
            if f"--{name}" in words and name in value:
                word = words[words.index(f"--{name}") + 1]
                value[name] = float(word) if isinstance(value[name], float) else word
        update(folder / file, **value)


def rows_of(folder, name):
    """The cells of the rows of that name in the table with all columns."""
    lines = (folder / "table.md").read_text().splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith(f"| {name} |")]


def test_one_command_makes_runs_that_train_alike(finished):
    losses = [read(finished / name / "summary.json")["losses"] for name in ("baseline-e2", "zero1-e2")]
    assert len(losses[0]) == 6
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert all(0 < epoch["validation_loss"] < 2 for epoch in read(finished / "zero1-e2" / "epochs.jsonl"))
    page = (finished / "report.html").read_text()
    assert "The strategies at equal total batch" in page
    assert "dp is left out: DataParallel needs two GPUs" in page
    assert "not the same work" not in page


def test_what_is_finished_is_not_run_again(again):
    text, code, started = again("baseline,zero1")
    assert (code, started) == (0, [])
    assert text.count("finished before, not run again") == 2
    (head,), (baseline,), (zero1,) = (rows_of(again.folder, name) for name in ("strategy", "baseline", "zero1"))
    assert head[:6] == ["strategy", "ranks", "epochs", "seconds", "s/epoch", "examples/s"]
    assert baseline[1:3] == ["1", "2"]
    assert baseline[6:8] == ["1.00", "100%"]
    assert head[8:10] == ["peak MB", "all ranks' MB"]
    assert baseline[8] == baseline[9]  # MB of the one process there is
    largest, of_all = (int(cell.replace(",", "")) for cell in zero1[8:10])
    assert largest <= of_all <= 2 * largest + 1  # rounded each
    assert zero1[1:3] == ["2", "2"]
    lines = [line.strip() for line in text.splitlines() if line.startswith(("strategy ", "zero1 "))]
    assert [re.split(r"\s{2,}", line) for line in lines] == [
        ["strategy", "ranks", "s/epoch", "speed-up", "peak MB", "sent MB/it"],
        ["zero1", "2", zero1[4], zero1[6], zero1[8], zero1[head.index("sent MB/it")]],
    ]


def in_summary(change):
    return lambda folder: edit(folder / "summary.json", change)


DAMAGES = {
    "half a summary": lambda folder: (folder / "summary.json").write_text('{"losses": '),
    "no memory": in_summary(lambda value: value.pop("memory")),
    "no epochs": in_summary(lambda value: value["epochs"].clear()),
    "an epoch without seconds": in_summary(lambda value: value["epochs"][0].pop("training")),
    "an epoch in no time": in_summary(lambda value: value["epochs"][0]["training"].update(wall_seconds=1e-3)),
    "an epoch without a loss": in_summary(lambda value: value["epochs"][-1].update(loss=None)),
    "no environment": lambda folder: (folder / "environment.json").unlink(),
    "rows of another run": lambda folder: (folder / "iterations.rank0.jsonl").write_text(""),
    "no rows of a rank": lambda folder: (folder / "iterations.rank1.jsonl").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_no_finished_run(finished, tmp_path, damage):
    folder = shutil.copytree(finished / "zero1-e2", tmp_path / "zero1-e2")
    assert load_entry_run(folder, "zero1-e2", {}).summary["world_size"] == 2
    DAMAGES[damage](folder)
    with pytest.raises(UserError, match=r"Run it again\.$|Give the folder of a finished run\.$"):
        load_entry_run(folder, "zero1-e2", {})


def test_a_folder_of_something_else_and_a_linked_run_are_refused(again, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("precious")
    (again.folder / "zero2-e2").symlink_to(mine)
    text, code, started = again("baseline,zero2")
    assert (code, started) == (1, [])
    assert "zero2-e2 is a link, where a run needs a folder of its own. Remove it" in text
    text, code, started = again("baseline", "--runs_dir", str(mine))
    assert (code, started) == (1, [])
    assert "mine is not empty and has no table of strategies. Choose another folder." in text
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]


OTHER_RUNS = {
    "another strategy's": (lambda folder: None, "its sync is zero1 and should be zero2"),
    "nobody's": (lambda folder: (folder / "config.json").unlink(), "is another run: its"),
    "renamed in one file": (
        lambda folder: update(folder / "config.json", sync="zero2"),
        "has sync zero1 in one file and zero2 in its config.json",
    ),
    "damaged": (DAMAGES["no memory"], "summary.json is damaged: it has no memory"),
}


@pytest.mark.parametrize("other", OTHER_RUNS)
def test_a_folder_with_another_run_is_run_again(again, other):
    forge, words = OTHER_RUNS[other]
    forge(shutil.copytree(again.folder / "zero1-e2", again.folder / "zero2-e2"))
    text, code, started = again("baseline,zero2")
    assert (code, started) == (0, ["zero2-e2"])
    assert words in text
    assert "zero2: 2 ranks, 2 epochs: run again, since" in text
    assert again("baseline,zero2")[2] == []


def test_a_row_whose_record_is_another_run_s_has_no_numbers(again):
    edit(again.folder / "strategies.json", lambda value: value["zero1-e2"].update(epochs=5.0))
    text, _, _ = again("baseline")
    assert rows_of(again.folder, "zero1")[0][:4] == ["zero1", "2", "5", "failed"]
    assert "its num_train_epochs is 2.0 and should be 5.0" in text


def test_runs_on_different_machines_are_a_caution(again):
    update(again.folder / "zero1-e2" / "environment.json", processor="a faster one")
    assert "not on the same ground: processor" in again("baseline,zero1", has_page=True)[0]
    assert "not on the same ground: processor" in (again.folder / "report.html").read_text()


def test_a_strategy_that_fails_is_a_row_with_its_reason_and_is_run_again(again):
    failed = "it failed with exit code 1: rank 1 was lost."
    text, code, started = again("baseline,zero2", code=1, last="rank 1 was lost.", has_page=True)
    assert (code, started) == (1, ["zero2-e2"])
    assert f"zero2, 2 epochs: {failed}" in text
    (row,) = rows_of(again.folder, "zero2")
    assert row[:4] == ["zero2", "2", "2", "failed"]
    assert re.search(r"^zero2 +2 +failed ", text, re.MULTILINE)
    for name in ("report.html", "table.md"):
        assert "zero2, 2 epochs: it failed" in (again.folder / name).read_text()
    text, code, started = again("baseline,zero2")
    assert (code, started) == (0, ["zero2-e2"])
    assert f"zero2: 2 ranks, 2 epochs: run again, since {failed}" in text
    assert again("baseline,zero2")[2] == []


def test_rows_of_earlier_calls_stay_in_the_table(again):
    text, code, started = again("zero2,zero3", code=1, last="rank 1 was lost.")
    assert (code, started) == (1, ["zero2-e2", "zero3-e2"])
    text, code, started = again("zero3", "--epochs", "3,2", has_page=True)
    assert (code, started) == (0, ["zero3-e3", "zero3-e2"])
    table = [line.split()[:4] for line in text[text.index("\nstrategy ") :].splitlines()[3:]]
    shape = {"baseline": "1", "zero1": "2", "dp": "1", "zero2": "2", "zero3": "2"}
    assert [row[:3] for row in table[:5]] == [[name, ranks, "2"] for name, ranks in shape.items()]
    assert [row[3] for row in table[2:4]] == ["left", "failed"], "an outcome is in the place of the seconds"
    assert table[5][:3] == ["zero3", "2", "3"]
    # Without a baseline of three epochs there is no speed-up.
    assert rows_of(again.folder, "zero3")[1][6:8] == ["-", "-"]
    assert "zero2, 2 epochs: it failed" in (again.folder / "report.html").read_text()


def test_an_interrupted_run_is_a_row_and_is_run_again(again, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run_jobs", made_by(interrupted))
    words = [*WORDS, "--no_cuda", "--strategies", "baseline,zero2,zero3", "--runs_dir", str(again.folder)]
    assert cli.main(["strategies", *words]) == 130
    assert again("zero3")[2] == ["zero3-e2"]
    assert rows_of(again.folder, "zero2")[0][3] == "broken off"
    assert "zero2: 2 ranks, 2 epochs: run again, since it was broken off" in again("zero2")[0]


def test_a_dry_run_lists_the_strategies_and_starts_none(again, monkeypatch):
    text, code, started = again("baseline,zero3,dp", "--dry_run")
    assert (code, started) == (0, [])
    rows = {line.split()[0]: line.split()[1:4] for line in text.splitlines() if re.match(r"\S+-e2 ", line)}
    assert rows == {"baseline-e2": ["1", "1", "6"], "zero3-e2": ["1", "2", "6"]}
    assert "dp is left out: DataParallel needs two GPUs" in text


def test_runs_made_in_parallel_stay_a_caution(again):
    text, code, started = again("zero2,zero3", "--parallel", "2")
    assert (code, started) == (0, ["zero2-e2", "zero3-e2"])
    assert "2 runs at a time share this machine" in text
    words = "2 of 4 runs ran up to 2 at a time"
    assert words in text
    assert words in again("baseline", has_page=True)[0]
    assert words in (again.folder / "report.html").read_text()


def test_a_damaged_state_is_a_warning_and_is_replaced(again):
    (again.folder / "strategies.json").write_text('{"zero1-e2": {"label": 3}}')
    text, code, started = again("baseline,zero1")
    assert (code, started) == (0, [])
    assert "warning: how earlier runs in this folder ended is unknown: " in text
    assert "strategies.json is damaged: its zero1-e2.label is 3, where text is expected" in text
    assert "is not known" not in again("baseline,zero1")[0]


@pytest.mark.parametrize(
    ("names", "words", "sentence"),
    [
        ("baseline", ("--seed", "7"), "was made with seed 42, and this command has 7"),
        # Of runs of earlier calls too: the table would show both.
        ("zero3", ("--precision", "bf16"), "baseline-e2 was made with precision fp32, and this command has bf16"),
        ("zero3", ("--world_size", "3"), "zero1-e2 was made with world_size 2, and this command has 3"),
        ("baseline,nonsense", (), "nonsense"),
        ("zero1:nonsense=1", (), "unknown option 'nonsense'"),
        ("zero1:bucket_mb=x", (), "bucket_mb 'x' is not valid. Give a number."),
        ("bucketed:compress=bf16,bucketed-compress=bf16", (), "bucketed-compress=bf16"),
        ("bucketed+bf16,bucketed@bf16", (), "bucketed@bf16"),
        (",", (), "has no name"),
        ("dp", (), "none of these can run here. dp: DataParallel needs two GPUs"),
        ("none", (), "none of these can run here. none: --sync none on 2 ranks lets the replicas drift apart"),
        *(("baseline", ("--epochs", word), "Give numbers above 0") for word in ("0", "x", "2,", "nan")),
    ],
)
def test_a_wrong_argument_is_a_sentence_before_anything_runs(again, names, words, sentence):
    text, code, started = again(names, *words)
    assert sentence in text
    assert code in (1, 2)
    assert started == []


def test_options_codecs_and_own_syncs_have_their_usual_names(again, tmp_path):
    own = tmp_path / "my_sync.py"
    assert cli.main(["new", str(own)]) == 0
    names = f"bucketed+bf16,bucketed:bucket_mb=0.5,{own}:MySync"
    started = again(names)[2]
    assert started[:2] == ["bucketed+bf16-e2", "bucketed-bucket_mb=0.5-e2"]
    assert started[2].endswith("my_sync.py-MySync-e2")


def test_an_engine_that_is_not_installed_is_left_out_with_the_way_to_install_it(again, monkeypatch):
    from importlib.metadata import PackageNotFoundError

    from cos598d.strategies.engines import engine

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(engine, "version", missing)
    text, code, started = again("baseline,deepspeed:zero_stage=1")
    assert (code, started) == (0, [])
    assert "deepspeed-zero_stage=1 is left out: --sync deepspeed needs DeepSpeed, which is not installed" in text
    assert "make engines" in text
    assert rows_of(again.folder, "deepspeed-zero_stage=1")[0][3] == "left out"
