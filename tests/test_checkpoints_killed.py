"""A save that is killed or fails at any step: the older checkpoints are complete, and the next start resumes."""

import contextlib
import errno
import os
import shutil
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
from full_disk import needs_small_disks, on_small_disk
from saved_states import COMM, SYNC, Stateful, Told, found_in, open_checkpoints, own_of, save, save_all
from worlds import run_ranks

from cos598d.checkpoints import find, writer
from cos598d.checkpoints import save as saving
from cos598d.checkpoints.layout import steps
from cos598d.checkpoints.restore import open_checkpoint


def kill_myself():
    os.kill(os.getpid(), signal.SIGKILL)


def run_killed(folder, work, step):
    """Run `work(tell)` in a process that is killed before its `step`-th operation on the disk under `folder`.

    Returns what it told before, as numbers, and whether it came to its end.
    """
    reader, written = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            count = 0

            def on_event(event, arguments):
                nonlocal count
                if event == "sync" or (isinstance(arguments[0], (str, Path)) and str(folder) in str(arguments[0])):
                    count += 1
                    if count == step:
                        kill_myself()

            def sync_then(descriptor, sync=writer.sync_to_disk):
                on_event("sync", (None,))
                sync(descriptor)

            from cos598d.checkpoints import layout

            layout.sync_to_disk = writer.sync_to_disk = sync_then
            sys.addaudithook(lambda event, arguments: on_event(event, arguments or (None,)))
            work(lambda number: os.write(written, bytes([number])))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(written)
    with os.fdopen(reader, "rb") as told:
        numbers = list(told.read())
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return numbers, code == 0


def work_in(folder):
    """Go back to iteration 4; save 6, which replaces what stands there and drops 8, and 7."""

    def work(tell):
        resumed = find(str(folder / "step-00000004"), None, COMM)
        with open_checkpoints(folder, COMM, 1, resumed) as checkpoints:
            for iteration in (6, 7):
                assert save(checkpoints, COMM, iteration) == []
                tell(iteration)

    return work


@pytest.mark.long
def test_a_save_killed_before_any_disk_operation_costs_only_itself(tmp_path):
    kept = tmp_path / "kept"
    save_all(kept, COMM, 2, 4, 6, 8, keep=3)
    is_whole, step, killed = False, 0, 0
    while not is_whole:
        step += 1
        folder = tmp_path / "checkpoints"
        shutil.copytree(kept, folder)
        told, is_whole = run_killed(folder, work_in(folder), step)
        killed += not is_whole

        with open_checkpoints(folder, COMM):  # as the next start does
            assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == [], step
        for _, place in steps(folder):
            open_checkpoint(place)  # or it raises Damaged
        found = find("auto", folder, COMM)
        allowed = {(): {8, 6}, (6,): {6, 7}, (6, 7): {7}}[tuple(told)]
        assert found.iteration in allowed, f"killed at {step}, having saved {told}"
        strategy = Stateful(COMM)
        found.restore(strategy, COMM, SYNC)
        strategy.assert_loaded(Stateful(COMM, found.iteration))
        save_all(folder, COMM, 9, resumed=found)
        assert find("auto", folder, COMM).iteration == 9
        shutil.rmtree(folder)
    assert killed > 60, "the hook saw the operations"


FULL = """
from cos598d.checkpoints import find, writer
from saved_states import COMM, Stateful, open_checkpoints, own_of

wrote = []

def write(*arguments, really=writer.write_tensors):
    wrote.append(True)
    return really(*arguments)

writer.write_tensors = write
checkpoints_folder, found = place / "checkpoints", []
if not values["is_foreseen"]:
    writer.Writing._check_room = lambda *_: None
with open_checkpoints(checkpoints_folder, COMM) as checkpoints:
    for iteration, room in enumerate((None, *values["rooms"], None), 1):
        if room is not None:
            leave(room)
        checkpoints.save(Stateful(COMM, iteration, scale=20), iteration, {}, lambda: own_of(COMM, iteration))
        said = checkpoints.hear()
        has_tried = bool(wrote)
        wrote.clear()
        (place / "filler").unlink(missing_ok=True)
        names = sorted(path.name for path in checkpoints_folder.iterdir())
        found.append([room, said, names, find("auto", checkpoints_folder, COMM).iteration, has_tried])
"""


@pytest.mark.long
@needs_small_disks
@pytest.mark.parametrize("is_foreseen", [True, False])
def test_a_full_disk_costs_only_that_checkpoint(tmp_path, is_foreseen):
    rooms = [0, 8, 100, 400]
    first, *full, last = on_small_disk(tmp_path / "disk", "16m", FULL, rooms=rooms, is_foreseen=is_foreseen)
    assert first == [None, [], ["step-00000001"], 1, True]
    for iteration, (room, said, names, newest, has_tried) in enumerate(full, 2):
        (sentence,) = said
        assert sentence == (
            f"the checkpoint of iteration {iteration} cannot be written to {tmp_path / 'disk' / 'checkpoints'} "
            "(No space left on device). Training continues, and that of iteration 1 is complete. Make room there."
        ), room
        assert (names, newest) == (["step-00000001"], 1)
        assert not (is_foreseen and has_tried), "the run's record would have met a full disk"
    assert last == [None, [], ["step-00000001", "step-00000006"], 6, True]


READ_ONLY = """
import subprocess
from cos598d.errors import UserError
from saved_states import COMM, open_checkpoints, save

found = []
(place / "run").mkdir()

def allow(how):
    subprocess.run(["mount", "-o", f"remount,{how}", "/proc/self/cwd"], check=True)

with open_checkpoints(place / "run" / "checkpoints", COMM) as checkpoints:
    found.append(save(checkpoints, COMM, 1))
    allow("ro")
    found.append(save(checkpoints, COMM, 2))
    allow("rw")
    found.append(save(checkpoints, COMM, 3))
allow("ro")
try:
    open_checkpoints(place / "run" / "checkpoints", COMM)
except UserError as error:
    found.append(str(error))
"""


@needs_small_disks
def test_a_read_only_folder_is_named(tmp_path):
    first, second, third, sentence = on_small_disk(tmp_path / "disk", "4m", READ_ONLY)
    folder = tmp_path / "disk" / "run" / "checkpoints"
    assert first == third == []
    assert second[0].startswith(f"the checkpoint of iteration 2 cannot be written to {folder} (Read-only file system)")
    assert sentence == f"no checkpoint can be kept in {folder} (Read-only file system). Choose another --output_dir."


def no_room(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "rows")


def refuse_rank_1(comm, folder, what):
    """Rank 1's disk is full for the second of three checkpoints, or for the record's rows that belong to it."""
    own = replace(own_of(comm, 2), complete=no_room if what == "rows" and comm.rank == 1 else own_of(comm, 2).complete)
    with open_checkpoints(folder, comm) as checkpoints:
        said = save(checkpoints, comm, 1)
        right = writer.write_tensors
        if what == "tensors" and comm.rank == 1:
            writer.write_tensors = no_room
        checkpoints.save(Stateful(comm, 2), 2, {}, lambda: own)
        said += checkpoints.hear()
        comm.exchange("the second has failed")
        between = found_in(folder)
        comm.exchange("both have looked")
        writer.write_tensors = right
        said += save(checkpoints, comm, 3)
    comm.exchange("the third is there")
    return [said, between, found_in(folder)]


@pytest.mark.parametrize("what", ["tensors", "rows"])
def test_where_one_rank_s_disk_is_full_the_older_checkpoint_stays_and_rank_0_warns(tmp_path, what):
    first, second = run_ranks(2, refuse_rank_1, str(tmp_path), what)
    (sentence,) = first[0]
    assert sentence == (
        f"the checkpoint of iteration 2 cannot be written to {tmp_path} (rank 1: No space left on device). "
        "Training continues, and that of iteration 1 is complete. Make room there."
    )
    assert second[0] == []
    assert first[1:] == [["step-00000001"], ["step-00000001", "step-00000003"]]


def test_an_error_while_writing_is_raised_in_the_training(tmp_path):
    def broken(_):
        raise ZeroDivisionError("a defect")

    with Told(tmp_path, COMM, describe=broken) as checkpoints:
        checkpoints.save(Stateful(COMM), 1, {}, lambda: own_of(COMM, 1))
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


def test_a_training_that_fails_drops_the_checkpoint_that_is_being_written(tmp_path):
    assert run_ranks(2, leave_early, str(tmp_path)) == [[], []]


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


def test_all_ranks_wait_for_a_slow_disk_and_rank_0_warns(tmp_path):
    """Not in a collective, where their patience would end with --timeout."""
    ((sentence,), first), *other = run_ranks(2, close_with_a_slow_disk, str(tmp_path))
    assert sentence.startswith(f"the checkpoint of iteration 3 is still being written to {tmp_path}, and all ranks")
    assert first == ["step-00000003"]
    assert other == [[[], first]]
