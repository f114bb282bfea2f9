"""Which folder a run may resume or start over in: it removes nothing of the user's, and nothing that it still needs."""

import itertools
import json
import os
import shutil
from dataclasses import asdict

import pytest
from lives import BASE, Lines, checkpoints_in, live
from recorded import add_iteration
from report_records import write_run
from saved_states import COMM, save_all
from worlds import run_ranks

from cos598d.attempt import publish_record
from cos598d.checkpoints import FOLDER, find, has_checkpoints, remove_all, whole_in
from cos598d.checkpoints.layout import step_name
from cos598d.checkpoints.resume import find_checkpoint, how_to_go_on, is_ours, open_record, say_if_finished
from cos598d.commands.sbatch import _command
from cos598d.config import RunConfig
from cos598d.errors import UsageError, UserError
from cos598d.measure.claim import claim_folder, told
from cos598d.measure.record import RunRecord
from cos598d.records.conventions import MODEL_FILES
from cos598d.terminal.files import whole_folder

TOKEN = "0123456789abcdef"


def config(**values):
    return RunConfig(**{"do_train": True, "do_eval": True, "resume": "auto", **values})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of 4 steps that has ended well, with its checkpoints, as far as a record tells."""
    folder = tmp_path_factory.mktemp("finished")
    run_ranks(1, live, str(folder), {"sync": "none", "max_steps": 4, "save_steps": 2})
    return folder


def test_a_folder_with_somebody_else_s_checkpoints_is_not_ours(tmp_path):
    theirs = tmp_path / FOLDER / "checkpoint-500"
    theirs.mkdir(parents=True)
    (theirs / "weights").write_text("precious")
    (tmp_path / "live").mkdir()
    (tmp_path / "live" / "concert.wav").write_text("precious")
    assert not is_ours(tmp_path, config())
    with pytest.raises(UserError, match="is not empty"):
        claim_folder(tmp_path, is_ours(tmp_path, config())).__enter__()
    remove_all(tmp_path / FOLDER)
    assert (theirs / "weights").exists()


@pytest.mark.parametrize("name", [f"{FOLDER}/{step_name(4)}", f"{FOLDER}/.{step_name(4)}.{TOKEN}.partial", "live"])
def test_a_folder_is_ours_when_this_run_has_left_it(name, tmp_path):
    (tmp_path / name).mkdir(parents=True)
    assert is_ours(tmp_path, config())
    assert is_ours(tmp_path, config(resume=str(tmp_path / ".." / tmp_path.name))) == name.startswith(FOLDER)
    assert not is_ours(tmp_path, config(resume=str(tmp_path / "other")))
    assert not is_ours(tmp_path, config(resume=None))


def test_a_run_that_starts_over_removes_only_our_files(tmp_path):
    checkpoints = tmp_path / "run" / FOLDER
    save_all(checkpoints, COMM, 3, 5)
    kept = ["notes.txt", f"{step_name(5)}/mine.txt", f"{step_name(5)}/model/mine.txt", f"{step_name(99)}/weights"]
    for name in kept:
        (checkpoints / name).parent.mkdir(exist_ok=True)
        (checkpoints / name).write_text("precious")
    open_record(tmp_path / "run", config(resume=None, overwrite_output_dir=True), COMM, None)
    assert files_in(checkpoints) == kept
    save_all(checkpoints, COMM, 7, 9, keep=1)
    assert [name for name in files_in(checkpoints) if not name.startswith(step_name(9))] == kept
    (reason,) = save_all(checkpoints, COMM, 99)
    assert step_name(99) in reason
    assert set(kept) < set(files_in(checkpoints))
    remove_all(tmp_path / "nowhere")
    scratch = tmp_path / "scratch"
    for name in (f".{step_name(5)}.{TOKEN}.old", step_name(5)):
        (scratch / name).mkdir(parents=True)
    (scratch / f".{step_name(5)}.{TOKEN}.old" / "mine.txt").write_text("precious")
    remove_all(scratch)
    assert files_in(scratch) == [f".{step_name(5)}.{TOKEN}.old/mine.txt"]
    save_all(tmp_path / "own", COMM, 3)
    remove_all(tmp_path / "own")
    assert not (tmp_path / "own").exists()


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def whole_run(folder):
    """All that a run does in a folder which it overwrites, but for the claim and the training."""
    with open_record(folder, config(resume=None, overwrite_output_dir=True), COMM, None) as record:
        record.describe({"config.json": {}}, {})
        add_iteration(record, 1)
        save_all(folder / FOLDER, COMM, 4, keep=1)
        publish_record(record, COMM, {}, {"config.json": {}}, keeps_model=False)
    with told(folder), whole_folder(folder / "model", MODEL_FILES) as model:
        (model / "config.json").write_text("{}")


def going_on(folder):
    """A run that goes on after its first row, whose files somebody else has sent."""
    with RunRecord(folder / "first", 0) as record:
        add_iteration(record, 1)
        position = record.position()
    position["departed"] = {"5": dict(position)}
    with RunRecord(folder, 0, resume=[position]) as record:  # to whose rows those in the folder do not fit
        add_iteration(record, 2)
        publish_record(record, COMM, {}, {}, keeps_model=False)


ROWS = "iterations.rank0.jsonl"
STEP = step_name(99)
# What is planted in the run's folder, in place of which of its entries; and where the user has that.
LINKS = [
    *[(f"live/{name}", "file") for name in (ROWS, "iterations.rank5.jsonl", "attempts.json", "wire.rank0.jsonl")],
    *[(name, "folder") for name in ("live", FOLDER, "model", "tensorboard")],
    *[
        (f"{FOLDER}/{name}", "folder")
        for name in (STEP, step_name(4), f".{STEP}.{TOKEN}.old", f".{STEP}.{TOKEN}.removed")
    ],
    *[(name, "file") for name in (ROWS, "summary.json", "config.json", "epochs.jsonl", "predictions.json")],
    *[(f"{name}/mine.txt", "own") for name in ("live", FOLDER, "model", "tensorboard", f"{FOLDER}/{STEP}")],
    *[(f"model/{name}", "file") for name in ("config.json", "mine.txt")],
    *[(f"live/{name}", what) for name in (ROWS, "attempts.json", "iterations.rank5.jsonl") for what in ("pipe", "dir")],
    *[(name, "pipe") for name in (ROWS, "summary.json", "live", f"{FOLDER}/{step_name(4)}/manifest.json")],
]


@pytest.mark.parametrize(("name", "kind"), LINKS)
def test_a_run_changes_no_file_of_the_user_s(name, kind, tmp_path):
    """Whatever is linked into a run's folder, or has a name there that no run gives: those who have not claimed it."""
    outcomes = []
    works, links = (whole_run, going_on), (os.symlink, os.link) if kind == "file" else (os.symlink,)
    for number, (work, link) in enumerate(itertools.product(works, links)):
        user, folder = tmp_path / f"user{number}", tmp_path / f"run{number}"
        for mine in ("mine.txt", "setting.json", ROWS, "config.json", f"{STEP}/manifest.json", "events.out.tfevents.1"):
            (user / mine).parent.mkdir(parents=True, exist_ok=True)
            (user / mine).write_text('{"iteration": 1, "loss": 1.0, "seconds": 0.1}\n' * 99)
        (folder / name).parent.mkdir(parents=True)
        if kind == "own":
            (folder / name).write_text("precious")
        elif kind in ("pipe", "dir"):
            (os.mkfifo if kind == "pipe" else os.mkdir)(folder / name)
        else:
            link(user / ROWS if kind == "file" else user, folder / name)
        before = {path: path.read_bytes() for path in user.rglob("*") if path.is_file()}
        try:
            work(folder)
            outcomes.append("done")
        except UserError as error:
            outcomes.append(str(error))
        assert {path: path.read_bytes() for path in user.rglob("*") if path.is_file()} == before
        if kind == "own":
            assert (folder / name).read_text() == "precious"
    assert not [outcome for outcome in outcomes if "\n" in outcome]
    assert "done" in outcomes or name in ("live", f"live/{ROWS}") or kind == "dir", outcomes


@pytest.mark.parametrize("name", ["live", FOLDER, "model", "tensorboard"])
def test_a_link_in_place_of_a_run_s_folder_is_refused_first(name, tmp_path):
    """The run's own folder may be a link."""
    (tmp_path / "real").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "real")
    with claim_folder(tmp_path / "run", overwrite=True):
        pass
    (tmp_path / "real" / name).symlink_to(tmp_path)
    with pytest.raises(UserError, match=rf"run/{name} is a link.* Remove it"):
        claim_folder(tmp_path / "run", overwrite=True).__enter__()
    (tmp_path / "real" / name).unlink()
    (tmp_path / "real" / "summary.json").mkdir()
    with pytest.raises(UserError, match=r"summary.json is a folder.* Remove it"):
        claim_folder(tmp_path / "run", overwrite=True).__enter__()


def test_an_earlier_checkpoint_that_cannot_be_removed_is_an_error(tmp_path, monkeypatch):
    save_all(tmp_path / FOLDER, COMM, 3)

    def refuse(path, *_, **__):
        raise OSError(13, "Permission denied", str(path))

    monkeypatch.setattr("cos598d.checkpoints.folder.remove", refuse)
    with pytest.raises(UserError, match="an earlier run's checkpoint cannot be removed .*Permission denied"):
        open_record(tmp_path, config(resume=None, overwrite_output_dir=True), COMM, None)


def test_a_checkpoint_whose_replacement_was_killed_is_found(tmp_path):
    save_all(tmp_path / FOLDER, COMM, 3)
    place = tmp_path / FOLDER / step_name(3)
    place.rename(place.with_name(f".{step_name(3)}.{TOKEN}.old"))
    assert has_checkpoints(tmp_path / FOLDER)
    found = find("auto", tmp_path / FOLDER, COMM)
    assert (found.path, found.iteration) == (place, 3)
    # Where the new one has taken the name, that one counts.
    shutil.copytree(place, place.with_name(f".{step_name(3)}.{TOKEN}.old"))
    assert find(str(tmp_path), None, COMM).path == place
    assert whole_in(tmp_path / FOLDER) == {(found.run, 3)}


def test_a_stop_advises_the_flags_that_resume(tmp_path):
    named = config(resume="old", output_dir=str(tmp_path))
    assert "--overwrite_output_dir" in how_to_go_on(tmp_path, named)
    save_all(tmp_path / FOLDER, COMM, 3)
    assert "run the same command with --resume auto." in how_to_go_on(tmp_path, named)
    assert "run the same command again." in how_to_go_on(tmp_path, config())


def test_a_requeued_job_may_not_start_over():
    with pytest.raises(UsageError, match=r"^--overwrite_output_dir would make a requeued job"):
        _command(["train", "--do_train", "--overwrite_output_dir", "--output_dir", "out"], 2)


def test_only_the_same_run_is_finished(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    folder, same = tmp_path / "run", config_of(finished)
    shutil.rmtree(folder / "live")
    (folder / "config.json").write_text(json.dumps(asdict(same)))
    record = write_run(tmp_path / "record", ranks=1, sync="none", batch=8, seconds=[1.0] * 4)
    (record / "summary.json").rename(folder / "summary.json")
    (folder / "model").mkdir()
    console = Lines(True)
    assert say_if_finished(folder, same, COMM, console)
    assert console.lines == [f"the run in {folder} is finished, so nothing is left to train."]
    for change, words in (
        ({"learning_rate": 1e-4}, "--learning_rate was 0.001 and is 0.0001"),
        ({"max_steps": 8}, "--max_steps was 4 and is 8"),
        ({"total_train_batch_size": 16}, "--total_train_batch_size was 8 and is 16"),
    ):
        other = config_of(finished, **change)
        with pytest.raises(UsageError, match=f"is finished.*: {words}. Choose another folder"):
            say_if_finished(folder, other, COMM, console)
        assert not say_if_finished(folder, config_of(finished, resume_anyway=True, **change), COMM, console)


def test_a_finished_record_without_a_checkpoint_is_not_overwritten(finished, tmp_path):
    """Made without a model, and asked for with one: there is nothing to go on from."""
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "iterations.rank0.jsonl").write_text("")
    assert not is_ours(tmp_path, config_of(finished))
    with pytest.raises(UsageError, match="which has a finished run"):
        find_checkpoint(tmp_path, config_of(finished), {}, COMM, Lines(True))
    assert find_checkpoint(tmp_path, config_of(finished, overwrite_output_dir=True), {}, COMM, Lines(True)) is None


def config_of(folder, **changes):
    """The flags of the run in `lives.BASE`'s words."""
    values = BASE | {"sync": "none", "max_steps": 4, "save_steps": 2, "output_dir": str(folder), "resume": "auto"}
    return RunConfig(**{**values, **changes})


def test_evaluation_data_must_be_the_same_with_early_stopping(finished, tmp_path):
    go_on = {"sync": "none", "max_steps": 4, "resume": str(finished)}
    assert checkpoints_in(finished) == [2, 4]
    for place, values in enumerate(({"max_eval_examples": 8}, {"early_stopping": "3"})):
        (found,) = run_ranks(1, live, str(tmp_path / str(place)), go_on | values)
        assert found["from"] == 4
    go_on |= {"early_stopping": "3", "max_eval_examples": 8}
    with pytest.raises(AssertionError, match="the evaluation data differ"):
        run_ranks(1, live, str(tmp_path / "refused"), go_on)


def test_a_folder_of_an_unfinished_run_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "live").mkdir()
    (tmp_path / "live" / "attempts.json").write_text("{}")
    with pytest.raises(UserError, match="has an unfinished run. Resume it with --resume auto, start over with"):
        claim_folder(tmp_path, overwrite=False).__enter__()
