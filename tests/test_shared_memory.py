"""Memory that ranks share is private after a step, has a time limit and is freed; and averages in two levels."""

import errno
import gc
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from programs import TINY_TRAINING
from torch import nn
from worlds import run_ranks

from cos598d.comm import hosts
from cos598d.comm.communicator import Communicator
from cos598d.errors import UserError
from cos598d.records.conventions import GRADIENTS
from cos598d.sync.hierarchical import Hierarchical
from cos598d.sync.options import SyncOptions
from cos598d.sync.parts.shared_buffers import Segments
from cos598d.sync.shared_memory import SharedMemory
from cos598d.world.limits import available_bytes

SMALL_BUCKETS = SyncOptions(bucket_mb=100 / 2**20, first_bucket_mb=30 / 2**20)


def model_of_two_layers():
    """Sizes that no number of ranks divides, in buckets of its own for each layer's tensors."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))


def inputs(rank, step):
    return torch.full((2, 7), 1.0 + rank + 10 * step)


def off_the_mean(model, world_size, step):
    """The largest difference of the model's gradients from the mean over ranks."""
    expected = model_of_two_layers()
    for rank in range(world_size):
        (expected(inputs(rank, step)).sum() / world_size).backward()
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max(((p.grad - e.grad).abs().max() / e.grad.abs().max()).item() for p, e in pairs)


class LateCopy(SharedMemory):
    """Rank 1 copies long after the others can continue."""

    def wait_for_result(self, unit, call):
        super().wait_for_result(unit, call)
        if self.comm.rank == 1:
            time.sleep(0.1)


def change_gradients_at_once(comm):
    """On a rank: how far the averages are off, when each rank overwrites its own as soon as it has them."""
    model = model_of_two_layers()
    sync = LateCopy(comm, find_unused_parameters=False, options=SMALL_BUCKETS)
    module = sync.attach(model)
    worst = []
    for step in range(4):
        module(inputs(comm.rank, step)).sum().backward()
        sync.finish()
        worst.append(off_the_mean(model, comm.world_size, step))
        for p in model.parameters():
            p.grad.fill_(1e6 * (comm.rank + 1))
        # Zeroed in place, the next backward adds to what is in the shared segment.
        model.zero_grad(set_to_none=step % 2 == 0)
    return max(worst)


def test_no_rank_sees_another_s_changes_of_its_gradients():
    assert max(run_ranks(3, change_gradients_at_once)) < 1e-6


def wait_for_rank_1(comm):
    """On a rank: the error if rank 1 does not come, and after how many seconds."""
    Communicator.timeout_seconds = 0.5
    sync = SharedMemory(comm, find_unused_parameters=False)
    module = sync.attach(model_of_two_layers())
    found = None
    if comm.rank != 1:
        module(inputs(comm.rank, 0)).sum().backward()
        started = time.monotonic()
        with pytest.raises(UserError) as error:
            sync.finish()
        found = [str(error.value), time.monotonic() - started]
    comm.exchange("rank 1 stays until the others are told")
    return found


def test_an_error_names_the_rank_that_does_not_come():
    answers = run_ranks(3, wait_for_rank_1)
    for sentence, seconds in (answers[0], answers[2]):
        assert "rank 1 did not fill bucket 0 within 0.5 s" in sentence
        assert seconds > 0.4


def raiser(*error):
    """A function that raises this OSError on every call."""
    return lambda *_: (_ for _ in ()).throw(OSError(*error))


def refusals(comm):
    """On a rank: the errors of what cannot work."""
    errors = []
    for module, name, replacement in (
        (hosts, "host_groups", lambda comm: [[0, 1], [2]]),
        (os, "memfd_create", None),
        (os, "open", raiser(errno.EPERM, "Permission denied") if comm.rank == 2 else os.open),
        (os, "posix_fallocate", raiser(errno.ENOSPC, "No space left on device")),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, replacement) if replacement else patch.delattr(module, name)
            with pytest.raises(UserError) as error:
                SharedMemory(comm).attach(model_of_two_layers())
        errors.append(str(error.value))
    with pytest.raises(UserError) as error:
        Segments(comm, range(comm.world_size), [(2**56, torch.float32)], ["fill"])
    with pytest.raises(UserError, match=r"weight is on meta. Choose --sync ddp"):
        SharedMemory(comm).attach(nn.Linear(2, 2, device="meta"))
    return [*errors, str(error.value)]


def test_ranks_that_cannot_share_memory_have_the_same_error():
    answers = run_ranks(3, refusals)
    assert answers[0] == answers[1] == answers[2]
    several_hosts, no_memfd, not_opened, no_space_left, too_large = answers[0]
    assert "rank 2 is on another host than rank 0. Choose --sync hierarchical" in several_hosts
    assert "rank 0: this system has no memfd_create" in no_memfd
    assert "rank 2: the memory of rank 0 cannot be opened (Permission denied)" in not_opened
    assert "MiB of memory (No space left on device). Free memory" in no_space_left
    no_memory = "cannot share 1099511627776 MiB of memory (Cannot allocate memory)"
    assert f"rank 0: the ranks of its host {no_memory}" in too_large


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        ("0::/a/b", "sys/fs/cgroup/a", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:cpu,memory:/a/b",
            "sys/fs/cgroup/memory/a",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_available_bytes_are_what_a_parent_cgroup_leaves_of_its_limit(line, folder, files, tmp_path):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(f"7:pids:/a/b\n{line}\n")
    (tmp_path / folder / "b").mkdir(parents=True)
    assert available_bytes(tmp_path) > 5000
    limit, used, cache = files
    for name, text in ((limit, "9000\n"), (used, "5000\n"), ("memory.stat", f"anon 1\n{cache} 700\n")):
        (tmp_path / folder / name).write_text(text)
    assert available_bytes(tmp_path) == 4700
    (tmp_path / folder / "b" / limit).write_text("max\n")
    assert available_bytes(tmp_path) == 4700


MEMORY = "/memfd:cos598d (deleted)"


def let_go(comm):
    """On a rank: whether the memory is mapped and a descriptor of it open, at each stage of a sync's life."""
    model = model_of_two_layers()
    sync = SharedMemory(comm)
    unused = is_mapped_and_open()
    module = sync.attach(model)
    module(inputs(comm.rank, 0)).sum().backward()
    sync.finish()
    used = is_mapped_and_open()
    sync.detach()
    detached = is_mapped_and_open()
    assert off_the_mean(model, comm.world_size, 0) < 1e-6
    model.zero_grad(set_to_none=True)
    gc.collect()
    return unused, used, detached, is_mapped_and_open()


def shared_memory_of(pid):
    """What a process has mapped that others may write too."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if line.split()[1] == "rw-s"]


def is_mapped_and_open():
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return [MEMORY in shared_memory_of("self"), any("memfd:cos598d" in link for link in links)]


def test_the_memory_is_freed_with_the_last_gradient_in_it():
    for unused, used, detached, forgotten in run_ranks(2, let_go):
        assert unused == forgotten == [False, False]
        assert used == [True, True]
        assert detached[0]


def test_an_error_names_a_killed_rank_and_its_memory_has_no_file(start_ranks):
    ranks = start_ranks("task2b/run_glue.py", 3, [*TINY_TRAINING, "--max_steps", 100000, "--sync", "shared_memory"])
    for rank in ranks:
        rank.wait_for("iteration 5:")
        mapped = shared_memory_of(rank.process.pid)
        assert MEMORY in mapped
        assert all(path.endswith("(deleted)") for path in mapped if path.startswith("/dev/shm")), mapped
    # The first made the memory; the others have it still.
    ranks[0].process.send_signal(signal.SIGKILL)
    for rank in ranks[1:]:
        assert rank.wait() == 1, rank.text
        assert "lost connection to rank 0" in rank.text.strip().splitlines()[-1], rank.text
        assert "Traceback" not in rank.text, rank.text


def average_in_two_levels(comm, groups):
    """On a rank: how far the averages are off, and the ledger's calls and bytes next to the expected ones."""
    hosts.host_groups = lambda comm: groups
    model = model_of_two_layers()
    sync = Hierarchical(comm, find_unused_parameters=False, options=SMALL_BUCKETS)
    module = sync.attach(model)
    worst, steps = [], 2
    for step in range(steps):
        comm.ledger.iteration = step + 1
        module(inputs(comm.rank, step)).sum().backward()
        sync.finish()
        worst.append(off_the_mean(model, comm.world_size, step))
        model.zero_grad(set_to_none=True)
    rows = [row for row in comm.ledger.rows if row.purpose == GRADIENTS]
    found = [len(rows), sum(row.bytes_sent for row in rows), sum(row.bytes_received for row in rows)]
    sizes = [(p.numel(), p.element_size()) for p in model.parameters()]
    cost = Hierarchical.expected(sizes, comm.world_size, comm.rank, SMALL_BUCKETS, groups)
    sync.detach()
    return [max(worst), found, [steps * number for number in (cost.calls, cost.bytes_sent, cost.bytes_received)]]


@pytest.mark.parametrize(
    "groups",
    [[[0, 1], [2, 3]], [[0, 2, 3], [1]], [[0, 1], [2, 3], [4]], [[0], [1], [2]]],
    ids=["2+2", "3+1", "2+2+1", "1+1+1"],
)
def test_two_levels_average_and_only_each_host_s_first_rank_sends(groups):
    firsts = [members[0] for members in groups]
    answers = run_ranks(sum(map(len, groups)), average_in_two_levels, groups)
    for rank, (worst, found, expected) in enumerate(answers):
        assert worst < 1e-6
        assert found == expected, f"rank {rank}"
        assert (found[1] > 0) == (rank in firsts), f"rank {rank} sent {found[1]} bytes"
    # 2(h-1)/h S from each of the h first ranks, in two steps.
    payload = 4 * sum(p.numel() for p in model_of_two_layers().parameters())
    assert sum(found[1] for _, found, _ in answers) == 2 * 2 * (len(firsts) - 1) * payload


def test_hosts_are_in_the_order_of_their_first_ranks():
    names = SimpleNamespace(exchange=lambda value: ["b", "a", "b", "c", "a"])
    assert hosts.host_groups(names) == [[0, 2], [1, 4], [3]]
    seen = []
    for _ in range(2):
        hosts.host_groups(SimpleNamespace(exchange=lambda value: seen.append(value) or [value]))
    assert seen[0] == seen[1] != ""
