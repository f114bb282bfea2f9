"""Checkpoints on the disk: what is in them, damaged and forged ones, and a process that is killed while it saves one.

Calls the code that reads and writes them, since a damage is one byte and a program takes seconds.
"""

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from ranks import world
from safetensors.torch import load_file, save_file
from training_cases import describe, train

from cos598d.checkpoints.folder import UNREADABLE, Training, newest, read, steps, write
from cos598d.errors import UserError
from cos598d.plan import Position


@pytest.fixture(scope="module")
def ranks():
    with world(2) as started:
        yield started


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Two checkpoints of a training on two ranks, of iterations 2 and 4."""
    folder = tmp_path_factory.mktemp("saved")
    ranks.run(_save, str(folder))
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def _save(folder):
    train("bucketed", folder=folder, save_at=(2, 4), steps=4)


def make(folder: Path, iteration: int, keep: int = 2) -> None:
    """Write a checkpoint whose only weight is its iteration."""
    training = Training(4, 1, {}, Position(iteration), {}, {})
    tensors = {"weights/w": torch.full((3,), float(iteration)), "exp_avg/w": torch.zeros(3)}
    write(folder, training, tensors, describe, keep)


def test_a_checkpoint_is_a_model_and_no_pickle(saved):
    place = saved / "step-00000004"
    names = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
    assert names == {"model/config.json", "model/model.safetensors", "state.safetensors", "training.json"}
    model, state = load_file(place / "model/model.safetensors"), load_file(place / "state.safetensors")
    assert model["table.weight"].shape == (3000, 8)
    assert {"exp_avg/last.bias", "step/last.bias", "buffers/shift", "rank0/random/cpu", "rank1/random/cpu"} <= set(
        state
    )
    assert not any(key.endswith(("/never.weight", "/frozen.weight")) for key in state)
    modes = {path.stat().st_mode for path in place.rglob("*") if path.is_file()}
    assert len(modes) == 1  # the library's own files could be read by their owner only


def test_the_newest_are_kept(tmp_path):
    for iteration in range(1, 7):
        make(tmp_path, iteration, keep=2)
    assert [number for number, _ in steps(tmp_path)] == [6, 5]
    make(tmp_path, 4, keep=2)  # another attempt: what came later is not its own
    assert [number for number, _ in steps(tmp_path)] == [4]


DAMAGES = {
    "no training.json": lambda place: (place / "training.json").unlink(),
    "half of training.json": lambda place: _cut(place / "training.json"),
    "training.json is a list": lambda place: (place / "training.json").write_text("[]"),
    "training.json is no text": lambda place: (place / "training.json").write_bytes(b"\xff\xfe"),
    "an older format": lambda place: _older(place / "training.json"),
    "the state is cut": lambda place: _cut(place / "state.safetensors"),
    "the state is empty": lambda place: (place / "state.safetensors").write_bytes(b""),
    "the weights are missing": lambda place: shutil.rmtree(place / "model"),
    "the weights' header lies": lambda place: (place / "model/model.safetensors").write_bytes(b"\xff" * 64),
}


def _cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _older(path: Path) -> None:
    path.write_text(path.read_text().replace('"format": 4', '"format": 3'))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_passed_over_with_a_sentence(folder, damage):
    place = folder / "step-00000004"
    DAMAGES[damage](place)
    with pytest.raises(UNREADABLE):
        read(place)
    found, remarks = newest(folder)
    assert found.training.position.iteration == 2
    assert [remark.startswith(f"the checkpoint {place} is damaged (") for remark in remarks] == [True]


def _state(place: Path, change) -> None:
    tensors = load_file(place / "state.safetensors")
    change(tensors)
    save_file(tensors, place / "state.safetensors")


FORGED = {  # each can be read, and fits no training
    "another shape of a buffer": lambda p: _state(p, lambda t: t.update({"buffers/shift": torch.zeros(2)})),
    "no weights": lambda p: save_file({}, p / "model/model.safetensors"),
}


def _resume(folder):
    try:
        train("bucketed", folder=folder, steps=5)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("forgery", FORGED)
def test_a_forged_one_ends_the_run_with_one_sentence(ranks, folder, forgery):
    FORGED[forgery](folder / "step-00000004")
    (said,) = set(ranks.run(_resume, str(folder), count=2))  # the same on every rank
    assert "Load it into the model that it is from." in said


def test_another_optimizers_state_is_left_out(ranks, folder):
    _state(folder / "step-00000004", lambda tensors: [tensors.pop(key) for key in list(tensors) if "exp_avg" in key])
    _state(folder / "step-00000004", lambda tensors: [tensors.pop(key) for key in list(tensors) if "step/" in key])
    (said,) = set(ranks.run(_said, str(folder), count=2))
    assert "what the optimizer remembers starts from scratch" in said


def _said(folder):
    return train("bucketed", folder=folder, steps=5)["said"]


CALLS = ("fsync", "rename", "replace", "chmod", "mkdir")
MOMENTS = 18  # of these calls; a save makes fewer


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_process_killed_while_it_saves_leaves_a_whole_one(tmp_path, moment):
    make(tmp_path, 3, keep=1)
    child = os.fork()
    if child == 0:
        _die_at(moment)
        make(tmp_path, 6, keep=1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL
    found, remarks = newest(tmp_path)
    assert not remarks
    assert found.training.position.iteration in ((6,) if status == 0 else (3, 6))
    assert found.tensors["weights/w"].tolist() == [found.training.position.iteration] * 3
    make(tmp_path, 9, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000009"]


def test_some_moments_are_before_the_end(tmp_path):
    """Else nothing would be killed above."""
    made = []
    _each_call(made.append, restore := {})
    try:
        make(tmp_path, 1)
    finally:
        for name, call in restore.items():
            setattr(os, name, call)
    assert 8 <= len(made) < MOMENTS
    assert made.index("rename") < len(made) - 1


def _die_at(moment: int) -> None:
    left = [moment]

    def count(_: str) -> None:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    _each_call(count, {})


def _each_call(tell, before: dict) -> None:
    for name in CALLS:
        before[name] = getattr(os, name)

        def call(*words, _name=name, **more):
            tell(_name)
            return before[_name](*words, **more)

        setattr(os, name, call)


def test_a_full_disk_costs_only_that_checkpoint(tmp_path, monkeypatch):
    make(tmp_path, 3)
    monkeypatch.setattr(os, "fsync", _full)
    with pytest.raises(OSError, match="No space left"):
        make(tmp_path, 6)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def _full(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_training_goes_on_when_the_disk_is_full(ranks, tmp_path):
    for found in ranks.run(_train_on_a_full_disk, str(tmp_path), count=2):
        assert len(found["losses"]) == 4
    assert not list(tmp_path.iterdir())


def _train_on_a_full_disk(folder):
    before, os.fsync = os.fsync, _full
    try:
        return train("all_reduce", folder=folder, save_at=(2,), steps=4)
    finally:
        os.fsync = before
