"""Checkpoints on the disk: what is saved comes back to the last bit, on any number of ranks, and what is old goes."""

import contextlib
import errno
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from saved_states import SYNC, Stateful, Told, open_checkpoints, own_of, save, save_all
from worlds import run_ranks

from cos598d.checkpoints import find, load_random_states, random_states, writer
from cos598d.checkpoints import save as saving
from cos598d.checkpoints.restore import find_best
from cos598d.checkpoints.snapshot import HostMemory
from cos598d.comm.communicator import Communicator
from cos598d.data.text.tokenization import load_encoder
from cos598d.errors import UserError
from cos598d.models.build import build_model, find_model
from cos598d.models.checkpoint import save_model


@pytest.fixture
def comm():
    return Communicator(None, "gloo", torch.device("cpu"))


def found_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def restored(comm, checkpoint, seed, sync=SYNC):
    """Restore on this rank, hold it to what iteration `seed` had; whether all came back, with the same ranks."""
    strategy, saved = Stateful(comm, seed=999), Stateful(comm, seed)
    own, lost = checkpoint.restore(strategy, comm, sync)
    strategy.assert_loaded(saved)
    assert strategy.scalars_loaded == saved.scalars()
    if lost is None:
        facts, tensors = saved.own_state()
        assert strategy.own[0] == facts
        assert torch.equal(strategy.own[1]["error"], tensors["error"])
    else:
        assert strategy.own is None
        assert lost == strategy.own_is_lost
    if comm.rank < checkpoint.world_size:
        assert own.facts == own_of(comm, seed).facts
        assert torch.equal(own.tensors["random"], own_of(comm, seed).tensors["random"])
    else:
        assert own is None
    return lost is None


def saved_and_restored(comm, folder):
    save_all(folder, comm, 3, 5)
    return restored(comm, find("auto", Path(folder), comm), 5)


def restored_elsewhere(comm, folder, sync):
    return restored(comm, find("auto", Path(folder), comm), 5, sync)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_saved_comes_back_to_the_last_bit(tmp_path, ranks):
    """On another number of ranks or under another sync, all except what each rank's strategy remembered."""
    assert run_ranks(ranks, saved_and_restored, str(tmp_path)) == [True] * ranks
    each = [f"{kind}.rank{rank}.safetensors" for kind in ("optimizer", "own") for rank in range(ranks)]
    files = [*each, *(f"rank{rank}.json" for rank in range(ranks)), "manifest.json", "model", "training.json"]
    assert found_in(tmp_path / "step-00000005") == sorted(files)
    after = {1: 2, 2: 3, 3: 1}[ranks]
    assert run_ranks(after, restored_elsewhere, str(tmp_path), SYNC) == [False] * after
    assert run_ranks(ranks, restored_elsewhere, str(tmp_path), SYNC | {"bucket_mb": 5}) == [False] * ranks


def save_far(comm, folder):
    # A rank that has another disk has no such folder, or another one of this name.
    mine = Path(folder) / ("" if comm.rank != 1 else "elsewhere")
    save_all(mine, comm, 4, 5)
    return [restored(comm, find("auto", mine, comm), 5), mine.exists()]


def test_what_a_rank_on_another_disk_has_reaches_rank_0_which_alone_needs_the_folder(tmp_path):
    assert run_ranks(3, save_far, str(tmp_path)) == [[True, True], [True, False], [True, True]]
    assert (tmp_path / "step-00000005" / "own.rank1.safetensors").exists()
    assert found_in(tmp_path) == ["step-00000004", "step-00000005"]


def test_the_weights_are_a_model_s_folder(tmp_path, comm):
    save_all(tmp_path, comm, 5)
    model = tmp_path / "step-00000005" / "model"
    assert found_in(model) == ["config.json", "model.safetensors", "vocab.txt"]
    wholes = Stateful(comm, 5).wholes
    expected = {name: tensor for (kind, name), tensor in wholes.items() if kind in ("weights", "buffers")}
    found = load_file(model / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    umask = os.umask(0)
    os.umask(umask)
    assert (model / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask, "whoever may read the folder may"


def test_the_weights_load_as_any_model_s(tmp_path, comm):
    source = find_model("tiny")
    model = build_model(source, "sequence_classification", 2, 0.0, seed=3)

    def describe(folder):
        save_model(folder, model, load_encoder(source.model_type, source.vocabulary, source.lower_case))
        (folder / "pytorch_model.bin").unlink()

    strategy = Stateful(comm)
    strategy.wholes = {("weights", name): parameter.detach() for name, parameter in model.named_parameters()}
    with Told(tmp_path, comm, 1, describe=describe) as checkpoints:
        checkpoints.save(strategy, 1, {}, lambda: own_of(comm, 1))
        assert checkpoints.hear() == []
    found = find_model(str(tmp_path / "step-00000001" / "model"))
    loaded = build_model(found, "sequence_classification", 2, 0.0, seed=4).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_what_a_device_copies_is_written_when_it_has_arrived(tmp_path, comm, monkeypatch):
    is_there = []

    class Stream:
        def record_event(self):
            return self

        def synchronize(self):
            is_there.append(True)

    def write(*arguments, really=writer.write_tensors):
        assert is_there
        return really(*arguments)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(writer, "write_tensors", write)
    strategy = Stateful(comm)
    with open_checkpoints(tmp_path, comm) as checkpoints:
        checkpoints._memory = HostMemory(torch.device("cuda"))
        monkeypatch.setattr(checkpoints._memory, "_new", lambda size: torch.empty(size, dtype=torch.uint8))
        checkpoints.save(strategy, 1, {}, lambda: own_of(comm, 1))
        assert checkpoints.hear() == []
    assert is_there == [True]


def test_all_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, comm, monkeypatch):
    events = []

    def sync(descriptor, really=os.fsync):
        events.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        really(descriptor)

    def rename(old, new, really=os.rename):
        events.append((os.path.relpath(old, tmp_path), os.path.relpath(new, tmp_path)))
        really(old, new)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    save_all(tmp_path, comm, 5)
    (named,) = [event for event in events if isinstance(event, tuple)]
    place = events.index(named)
    before = {os.path.relpath(event, named[0]) for event in events[:place]}
    files = json.loads((tmp_path / "step-00000005" / "manifest.json").read_text())["files"]
    assert before == {*files, "manifest.json", "model", "."}
    assert os.path.relpath(events[place - 3], named[0]) == "manifest.json", "the last file"
    assert events[place + 1 :] == ["."], "and its name"


def test_a_checkpoint_is_what_the_training_was_when_it_was_saved(tmp_path, comm):
    strategy = Stateful(comm, 5)
    before = {name: tensor.clone() for name, tensor in strategy.wholes.items()}
    with open_checkpoints(tmp_path, comm) as checkpoints:
        facts = {"losses": [1.0]}
        checkpoints.save(strategy, 5, facts, lambda: own_of(comm, 5))
        for tensor in strategy.wholes.values():  # the next step
            tensor.zero_()
        facts["losses"].append(2.0)
        checkpoints.close()
        checkpoints.save(strategy, 6, facts, lambda: own_of(comm, 6))
        checkpoints.close()
    strategy.wholes = before
    found = find(str(tmp_path / "step-00000005"), None, comm)
    assert found.training == {"losses": [1.0]}
    again = Stateful(comm)
    found.restore(again, comm, SYNC)
    again.assert_loaded(strategy)


def test_the_newest_and_the_best_are_kept_whatever_the_clock_says(tmp_path, comm):
    save_all(tmp_path, comm, 1, 2, 3, best=(1,))
    for age, name in enumerate(found_in(tmp_path)):
        os.utime(tmp_path / name, (1e9 - age * 1e6,) * 2)  # the newest is the oldest by the clock
    resumed = find("auto", tmp_path, comm)
    assert resumed.iteration == 3
    save_all(tmp_path, comm, 4, 5, resumed=resumed)
    assert found_in(tmp_path) == ["step-00000001", "step-00000004", "step-00000005"]
    save_all(tmp_path, comm, 6, 7, best=(6,), resumed=find("auto", tmp_path, comm))
    assert found_in(tmp_path) == ["step-00000006", "step-00000007"], "a better one takes the best one's place"
    save_all(tmp_path, comm, 8, 9, keep=1, resumed=find("auto", tmp_path, comm))
    assert found_in(tmp_path) == ["step-00000006", "step-00000009"]


def test_a_run_that_went_back_drops_what_came_after_only_when_it_has_a_checkpoint_of_its_own(tmp_path, comm):
    save_all(tmp_path, comm, 10, 20, 30, keep=3, best=(30,))
    resumed = find(str(tmp_path / "step-00000010"), None, comm)
    with open_checkpoints(tmp_path, comm, resumed=resumed) as checkpoints:
        assert found_in(tmp_path) == ["step-00000010", "step-00000020", "step-00000030"]
        save(checkpoints, comm, 20)
    assert found_in(tmp_path) == ["step-00000010", "step-00000020"]
    assert restored(comm, find("auto", tmp_path, comm), 20)


def test_an_earlier_run_s_checkpoints_stand_until_the_new_run_has_one(tmp_path, comm):
    save_all(tmp_path, comm, 3, 200, best=(3,))
    with open_checkpoints(tmp_path, comm) as checkpoints:
        assert found_in(tmp_path) == ["step-00000003", "step-00000200"]
        save(checkpoints, comm, 5)
    assert found_in(tmp_path) == ["step-00000005"]


def test_what_killed_saves_left_goes_at_the_next_start_and_nothing_else_does(tmp_path, comm):
    save_all(tmp_path, comm, 5, 6)
    token = "0123456789abcdef"
    for name in (f".step-00000007.{token}.partial", f".step-00000004.{token}.removed", f".probe-{token}"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / "config.json").write_text("x")
    outside = tmp_path.with_name(f"{tmp_path.name}-outside")
    outside.mkdir()
    (outside / "kept").write_text("x")
    (tmp_path / f".step-00000009.{token}.partial").symlink_to(outside)
    (tmp_path / "step-00000005").rename(tmp_path / f".step-00000005.{token}.old")  # killed between two renames
    for name in (".hidden", "notes.txt", ".step-00000007.partial"):
        (tmp_path / name).write_text("the user's")
    (tmp_path / "step-00000099").symlink_to(outside)
    kept = [".hidden", ".step-00000007.partial", "notes.txt", "step-00000005", "step-00000006", "step-00000099"]
    with open_checkpoints(tmp_path, comm):
        assert found_in(tmp_path) == kept
    assert found_in(outside) == ["kept"]
    assert find("auto", tmp_path, comm).iteration == 6
    save_all(tmp_path, comm, 7)
    assert found_in(outside) == ["kept"]


def test_of_two_runs_in_one_folder_the_second_is_told(tmp_path, comm):
    with open_checkpoints(tmp_path / "one", comm):
        with pytest.raises(UserError, match="one is in use by another run. Choose another --output_dir"):
            open_checkpoints(tmp_path / "one", comm)
        assert found_in(tmp_path / "one") == []
    open_checkpoints(tmp_path / "one", comm).__exit__()


def refuse(comm, folder):
    try:
        open_checkpoints(folder, comm)
    except UserError as error:
        return str(error)


def test_a_folder_that_cannot_be_made_is_one_sentence_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "checkpoints"
    sentence = f"no checkpoint can be kept in {place} (Not a directory). Choose another --output_dir."
    assert run_ranks(2, refuse, str(place)) == [sentence] * 2


def refuse_rank_1(comm, folder):
    with open_checkpoints(folder, comm) as checkpoints:
        said = save(checkpoints, comm, 1)
        right, writer.write_tensors = writer.write_tensors, no_room if comm.rank == 1 else writer.write_tensors
        said += save(checkpoints, comm, 2)
        comm.exchange("the second has failed")
        between = found_in(folder)
        comm.exchange("both have looked")
        writer.write_tensors = right
        said += save(checkpoints, comm, 3)
    comm.exchange("the third is there")
    return [said, between, found_in(folder)]


def no_room(*_):
    raise OSError(28, os.strerror(28))


def test_where_one_rank_s_disk_is_full_the_older_checkpoint_stands_and_rank_0_says_so(tmp_path):
    first, second = run_ranks(2, refuse_rank_1, str(tmp_path))
    (sentence,) = first[0]
    assert sentence == (
        f"the checkpoint of iteration 2 cannot be written to {tmp_path} (rank 1: No space left on device). "
        "Training continues, and that of iteration 1 is complete. Make room there."
    )
    assert second[0] == []
    assert first[1:] == [["step-00000001"], ["step-00000001", "step-00000003"]]


def test_a_defect_while_writing_is_raised_where_the_training_hears_of_it(tmp_path, comm):
    def broken(_):
        raise ZeroDivisionError("a defect")

    with Told(tmp_path, comm, describe=broken) as checkpoints:
        checkpoints.save(Stateful(comm), 1, {}, lambda: own_of(comm, 1))
        with pytest.raises(ZeroDivisionError, match="a defect"):
            checkpoints.close()
    assert found_in(tmp_path) == []


def leave_early(comm, folder):
    with contextlib.suppress(ZeroDivisionError), open_checkpoints(folder, comm) as checkpoints:
        if comm.rank == 0:
            checkpoints.save(Stateful(comm, 1), 1, {}, lambda: own_of(comm, 1))
            raise ZeroDivisionError("rank 1 will never write its part")
    comm.exchange("rank 0 has left")
    return found_in(folder)


def test_a_training_that_fails_gives_up_what_is_being_written(tmp_path):
    assert run_ranks(2, leave_early, str(tmp_path)) == [[], []]


def test_nothing_to_resume_from_is_none_for_auto_and_a_sentence_for_a_folder(tmp_path, comm):
    assert find("auto", tmp_path / "none", comm) is None
    assert find("auto", None, comm) is None
    (tmp_path / "empty").mkdir()
    assert find("auto", tmp_path / "empty", comm) is None
    with pytest.raises(UserError, match="there is no such folder"):
        find(str(tmp_path / "none"), None, comm)
    with pytest.raises(UserError, match="this folder has no checkpoint"):
        find(str(tmp_path / "empty"), None, comm)


def test_a_checkpoint_a_run_and_a_run_s_checkpoints_can_be_named(tmp_path, comm):
    save_all(tmp_path / "run" / "checkpoints", comm, 5, 6)
    named = {"run": 6, "run/checkpoints": 6, "run/checkpoints/step-00000005": 5}
    assert {name: find(str(tmp_path / name), None, comm).iteration for name in named} == named
    # A copy of one that is called something else.
    (tmp_path / "run" / "checkpoints" / "step-00000005").rename(tmp_path / "copy")
    assert find(str(tmp_path / "copy"), None, comm).iteration == 5


def load_best(comm, folder):
    with open_checkpoints(folder, comm) as checkpoints:
        assert not checkpoints.load_best(torch.nn.Module(), 1)
        for iteration in (1, 2, 3):
            save(checkpoints, comm, iteration, is_best=iteration < 3)
        assert not checkpoints.load_best(torch.nn.Module(), 1), "it is not the best any more"
    model = torch.nn.Module()
    model.layer = torch.nn.Linear(2, 1)
    model.register_buffer("counted", torch.zeros(3))
    names = {"layer.weight": (1, 2), "layer.bias": (1,)}
    with open_checkpoints(f"{folder}/model", comm) as checkpoints:
        strategy = Stateful(comm)
        draw = torch.Generator().manual_seed(1)
        strategy.wholes = {("weights", name): torch.randn(shape, generator=draw) for name, shape in names.items()}
        strategy.wholes |= {("buffers", "counted"): torch.arange(3.0), ("exp_avg", "layer.bias"): torch.ones(1)}
        checkpoints.save(strategy, 1, {}, lambda: own_of(comm, 1), is_best=True)
        checkpoints.close()
        assert checkpoints.load_best(model, 1)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, strategy.wholes["buffers" if name == "counted" else "weights", name]), name
    return found_in(folder)


def test_the_best_checkpoint_s_model_is_there_on_every_rank(tmp_path):
    assert run_ranks(2, load_best, str(tmp_path)) == [["model", "step-00000002", "step-00000003"]] * 2


def test_the_best_is_found_where_the_run_went_on_from_too(tmp_path, comm):
    save_all(tmp_path / "old", comm, 1, 2, best=(1,))
    found = find(str(tmp_path / "old"), None, comm)
    with open_checkpoints(tmp_path / "new", comm, resumed=found) as checkpoints:
        save(checkpoints, comm, 3)
        folders, run = [tmp_path / "new", tmp_path / "old"], found.run
        assert find_best(folders, run, comm).path == tmp_path / "old" / "step-00000001"
        save(checkpoints, comm, 4, is_best=True)
        assert find_best(folders, run, comm).iteration == 4


def write_slowly(*arguments, write=writer.write_tensors):
    time.sleep(0.5)
    return write(*arguments)


def close_with_a_slow_disk(comm, folder):
    if comm.rank == 0:
        writer.write_tensors = write_slowly
    saving.LONG_SECONDS = 0.01
    with open_checkpoints(folder, comm) as checkpoints:
        said = save(checkpoints, comm, 3)
        return [said, found_in(folder)]


def test_all_ranks_wait_for_the_checkpoint_that_a_slow_disk_takes_and_rank_0_says_so(tmp_path):
    """Not in a collective, where their patience would end with --timeout."""
    ((sentence,), first), *other = run_ranks(2, close_with_a_slow_disk, str(tmp_path))
    assert sentence.startswith(f"the checkpoint of iteration 3 is still being written to {tmp_path}, and all ranks")
    assert first == ["step-00000003"]
    assert other == [[[], first]]


def rows_that_cannot_be_written(comm, folder):
    def full():
        if comm.rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device", "rows")

    with open_checkpoints(folder, comm) as checkpoints:
        checkpoints.save(Stateful(comm, 3), 3, {}, lambda: replace(own_of(comm, 3), complete=full))
        return checkpoints.hear()


def test_a_checkpoint_whose_rows_are_not_on_the_disk_is_none(tmp_path):
    (said,), nothing = run_ranks(2, rows_that_cannot_be_written, str(tmp_path))
    assert "(rank 1: No space left on device)" in said
    assert nothing == []
    assert found_in(tmp_path) == []


def test_random_states_go_on_where_they_were():
    states = {name: state.clone() for name, state in random_states(torch.device("cpu")).items()}
    drawn = torch.rand(3)
    load_random_states(states, torch.device("cpu"))
    assert torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize("state", [torch.zeros(3), torch.zeros(3, dtype=torch.uint8), torch.zeros(())])
def test_random_states_that_are_none_are_one_sentence(state):
    with pytest.raises(UserError, match="random states cannot be restored"):
        load_random_states({"random_cpu": state}, torch.device("cpu"))
