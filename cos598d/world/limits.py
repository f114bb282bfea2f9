"""The resources of this process: open files, and freed memory that it keeps for the next step."""

import ctypes
import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from cos598d.errors import UserError

# Files that a rank opens in addition to its connections: libraries, data, its record, unknown connections.
OTHER_FILES = 192
FIRST_FILES = 32  # the most of them that are open before the ranks meet
# For each version of cgroups: its root folder, the files of limit and usage, and the row of its cache.
CGROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
# malloc.h's M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD, and our values. Older libraries accept at most 32 MiB for
# the last.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = (-1, 2**31 - 1), (-2, 64 << 20), (-3, 1 << 30)
LARGEST_OF_OLD = 32 << 20


def allow_descriptors(rank: int, world_size: int) -> None:
    """Raise this process's soft limit of open files to what its rank needs in addition to inherited ones.

    gloo connects every pair of ranks, and rank 0 also serves each of them. Raises UserError if the hard limit is lower.
    """
    _allow((2 if rank == 0 else 1) * world_size, f"rank {rank} of {world_size}")


def allow_workers(world_size: int) -> None:
    """The same for a process that is to start `world_size` ranks: it keeps two pipes to each."""
    _allow(2 * world_size, f"the launcher of {world_size} ranks")


def _allow(more: int, who: str) -> None:
    needed = more + OTHER_FILES + _inherited()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"{who} needs {needed} open files, and this process may have {hard} (ulimit -Hn). "
            f"Raise that limit on its host, or start fewer ranks."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _inherited() -> int:
    """How many descriptors are open already beyond the first few, such as those of earlier forks."""
    try:
        return max(0, len(os.listdir("/proc/self/fd")) - FIRST_FILES)
    except OSError:  # not Linux
        return 0


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory that this process can use before the kernel swaps or kills, as the kernel reports it."""
    return min([psutil.virtual_memory().available, *_left_by_cgroups(root)])


def _left_by_cgroups(root: Path) -> Iterator[int]:
    """The bytes that each cgroup of this process, and each above it, leaves of its limit; Linux only."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, place = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        above, limit, used, cache = CGROUPS[0 if number == "0" else 1]
        folder = root / above / place.lstrip("/")
        for group in (folder, *folder.parents):
            if not group.is_relative_to(root / above):
                break
            try:
                most, now = int((group / limit).read_text()), int((group / used).read_text())
                rows = dict(row.split() for row in (group / "memory.stat").read_text().splitlines())
                yield most - now + int(rows.get(cache, 0))
            except (OSError, ValueError):  # no limit ("max"), or a container that hides its own folder
                continue


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Make glibc's malloc keep freed blocks of up to a GiB. Return whether it does from now on.

    A step frees its activations and gradients, and the next one allocates them again. By default malloc returns the end
    of its heap to the kernel each time, and any block of more than 32 MiB, such as a word embedding's gradient. The
    kernel then hands out the same pages again, each cleared by a page fault: thousands per step for MiniLM. With this
    setting, a process keeps the memory of a step between two steps, too.

    Nothing changes if the user has set malloc's variables (MALLOC_ARENA_MAX, GLIBC_TUNABLES), or if the C library has
    no such options.
    """
    if any(name.startswith("MALLOC_") for name in environment) or "glibc.malloc." in environment.get(
        "GLIBC_TUNABLES", ""
    ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    keeps = mallopt(*TRIM_THRESHOLD) and mallopt(*TOP_PAD)
    return bool(keeps and (mallopt(*MMAP_THRESHOLD) or mallopt(MMAP_THRESHOLD[0], LARGEST_OF_OLD)))
