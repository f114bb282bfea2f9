"""Checkpoints on the disk: what is saved comes back to the last bit, on any number of ranks, and what is old goes."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from saved_states import COMM, SYNC, Stateful, Told, found_in, open_checkpoints, own_of, save, save_all
from worlds import run_ranks

from cos598d.checkpoints import find, load_random_states, random_states, writer
from cos598d.checkpoints.restore import find_best
from cos598d.checkpoints.snapshot import HostMemory
from cos598d.errors import UserError
from cos598d.models.build import build_model, find_model
from cos598d.models.checkpoint import save_model


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


def test_only_rank_0_needs_the_folder_and_gets_what_other_ranks_have(tmp_path):
    assert run_ranks(3, save_far, str(tmp_path)) == [[True, True], [True, False], [True, True]]
    assert (tmp_path / "step-00000005" / "own.rank1.safetensors").exists()
    assert found_in(tmp_path) == ["step-00000004", "step-00000005"]


def test_a_checkpoint_s_weights_are_a_model_s_folder(tmp_path):
    save_all(tmp_path, COMM, 5)
    model = tmp_path / "step-00000005" / "model"
    assert found_in(model) == ["config.json", "model.safetensors", "vocab.txt"]
    wholes = Stateful(COMM, 5).wholes
    expected = {name: tensor for (kind, name), tensor in wholes.items() if kind in ("weights", "buffers")}
    found = load_file(model / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    umask = os.umask(0)
    os.umask(umask)
    assert (model / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask, "whoever may read the folder may"


def test_a_checkpoint_s_weights_load_as_a_model(tmp_path):
    source = find_model("tiny")
    model = build_model(source, "sequence_classification", 2, 0.0, seed=3)

    def describe(folder):
        save_model(folder, model, source.encoder)
        (folder / "pytorch_model.bin").unlink()

    strategy = Stateful(COMM)
    strategy.wholes = {("weights", name): parameter.detach() for name, parameter in model.named_parameters()}
    with Told(tmp_path, COMM, 1, describe=describe) as checkpoints:
        checkpoints.save(strategy, 1, {}, lambda: own_of(COMM, 1))
        assert checkpoints.hear() == []
    found = find_model(str(tmp_path / "step-00000001" / "model"))
    loaded = build_model(found, "sequence_classification", 2, 0.0, seed=4).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_a_device_s_copies_are_written_after_they_have_arrived(tmp_path, monkeypatch):
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
    strategy = Stateful(COMM)
    with open_checkpoints(tmp_path, COMM) as checkpoints:
        checkpoints._memory = HostMemory(torch.device("cuda"))
        monkeypatch.setattr(checkpoints._memory, "_new", lambda size: torch.empty(size, dtype=torch.uint8))
        checkpoints.save(strategy, 1, {}, lambda: own_of(COMM, 1))
        assert checkpoints.hear() == []
    assert is_there == [True]


def test_all_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    events = []

    def sync(descriptor, really=os.fsync):
        events.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        really(descriptor)

    def rename(old, new, really=os.rename):
        events.append((os.path.relpath(old, tmp_path), os.path.relpath(new, tmp_path)))
        really(old, new)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    save_all(tmp_path, COMM, 5)
    (named,) = [event for event in events if isinstance(event, tuple)]
    place = events.index(named)
    before = {os.path.relpath(event, named[0]) for event in events[:place]}
    files = json.loads((tmp_path / "step-00000005" / "manifest.json").read_text())["files"]
    assert before == {*files, "manifest.json", "model", "."}
    assert os.path.relpath(events[place - 3], named[0]) == "manifest.json", "the last file"
    assert events[place + 1 :] == ["."], "and its name"


def test_later_steps_do_not_change_a_checkpoint_that_is_being_written(tmp_path):
    strategy = Stateful(COMM, 5)
    before = {name: tensor.clone() for name, tensor in strategy.wholes.items()}
    with open_checkpoints(tmp_path, COMM) as checkpoints:
        facts = {"losses": [1.0]}
        checkpoints.save(strategy, 5, facts, lambda: own_of(COMM, 5))
        for tensor in strategy.wholes.values():  # the next step
            tensor.zero_()
        facts["losses"].append(2.0)
        checkpoints.close()
        checkpoints.save(strategy, 6, facts, lambda: own_of(COMM, 6))
        checkpoints.close()
    strategy.wholes = before
    found = find(str(tmp_path / "step-00000005"), None, COMM)
    assert found.training == {"losses": [1.0]}
    again = Stateful(COMM)
    found.restore(again, COMM, SYNC)
    again.assert_loaded(strategy)


def test_the_newest_and_the_best_are_kept_whatever_the_clock_says(tmp_path):
    save_all(tmp_path, COMM, 1, 2, 3, best=(1,))
    for age, name in enumerate(found_in(tmp_path)):
        os.utime(tmp_path / name, (1e9 - age * 1e6,) * 2)  # the newest is the oldest by the clock
    resumed = find("auto", tmp_path, COMM)
    assert resumed.iteration == 3
    save_all(tmp_path, COMM, 4, 5, resumed=resumed)
    assert found_in(tmp_path) == ["step-00000001", "step-00000004", "step-00000005"]
    save_all(tmp_path, COMM, 6, 7, best=(6,), resumed=find("auto", tmp_path, COMM))
    assert found_in(tmp_path) == ["step-00000006", "step-00000007"], "a better one takes the best one's place"
    save_all(tmp_path, COMM, 8, 9, keep=1, resumed=find("auto", tmp_path, COMM))
    assert found_in(tmp_path) == ["step-00000006", "step-00000009"]


def test_a_run_that_went_back_removes_later_checkpoints_after_its_own_first_one(tmp_path):
    save_all(tmp_path, COMM, 10, 20, 30, keep=3, best=(30,))
    resumed = find(str(tmp_path / "step-00000010"), None, COMM)
    with open_checkpoints(tmp_path, COMM, resumed=resumed) as checkpoints:
        assert found_in(tmp_path) == ["step-00000010", "step-00000020", "step-00000030"]
        save(checkpoints, COMM, 20)
    assert found_in(tmp_path) == ["step-00000010", "step-00000020"]
    assert restored(COMM, find("auto", tmp_path, COMM), 20)


def test_an_earlier_run_s_checkpoints_stay_until_the_new_run_has_one(tmp_path):
    save_all(tmp_path, COMM, 3, 200, best=(3,))
    with open_checkpoints(tmp_path, COMM) as checkpoints:
        assert found_in(tmp_path) == ["step-00000003", "step-00000200"]
        save(checkpoints, COMM, 5)
    assert found_in(tmp_path) == ["step-00000005"]


def test_the_next_start_removes_only_what_killed_saves_have_left(tmp_path):
    save_all(tmp_path, COMM, 5, 6)
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
    with open_checkpoints(tmp_path, COMM):
        assert found_in(tmp_path) == kept
    assert found_in(outside) == ["kept"]
    assert find("auto", tmp_path, COMM).iteration == 6
    save_all(tmp_path, COMM, 7)
    assert found_in(outside) == ["kept"]


def test_the_second_of_two_runs_in_one_folder_is_refused(tmp_path):
    with open_checkpoints(tmp_path / "one", COMM):
        with pytest.raises(UserError, match="one is in use by another run. Choose another --output_dir"):
            open_checkpoints(tmp_path / "one", COMM)
        assert found_in(tmp_path / "one") == []
    open_checkpoints(tmp_path / "one", COMM).__exit__()


def test_auto_finds_nothing_without_a_folder_or_in_an_empty_one(tmp_path):
    for folder in (None, tmp_path / "none", tmp_path):
        assert find("auto", folder, COMM) is None


def test_a_checkpoint_a_run_and_a_run_s_checkpoints_can_be_named(tmp_path):
    save_all(tmp_path / "run" / "checkpoints", COMM, 5, 6)
    named = {"run": 6, "run/checkpoints": 6, "run/checkpoints/step-00000005": 5}
    assert {name: find(str(tmp_path / name), None, COMM).iteration for name in named} == named
    # A copy of one that is called something else.
    (tmp_path / "run" / "checkpoints" / "step-00000005").rename(tmp_path / "copy")
    assert find(str(tmp_path / "copy"), None, COMM).iteration == 5


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


def test_every_rank_loads_the_best_checkpoint_s_model(tmp_path):
    assert run_ranks(2, load_best, str(tmp_path)) == [["model", "step-00000002", "step-00000003"]] * 2


def test_the_best_is_also_found_where_the_run_was_resumed_from(tmp_path):
    save_all(tmp_path / "old", COMM, 1, 2, best=(1,))
    found = find(str(tmp_path / "old"), None, COMM)
    with open_checkpoints(tmp_path / "new", COMM, resumed=found) as checkpoints:
        save(checkpoints, COMM, 3)
        folders, run = [tmp_path / "new", tmp_path / "old"], found.run
        assert find_best(folders, run, COMM).path == tmp_path / "old" / "step-00000001"
        save(checkpoints, COMM, 4, is_best=True)
        assert find_best(folders, run, COMM).iteration == 4


def test_restored_random_states_draw_the_same_numbers():
    states = {name: state.clone() for name, state in random_states(torch.device("cpu")).items()}
    drawn = torch.rand(3)
    load_random_states(states, torch.device("cpu"))
    assert torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize("state", [torch.zeros(3), torch.zeros(3, dtype=torch.uint8), torch.zeros(())])
def test_damaged_random_states_are_refused(state):
    with pytest.raises(UserError, match="random states cannot be restored"):
        load_random_states({"random_cpu": state}, torch.device("cpu"))
