"""What this process may still take from its host: open files, and memory."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from cos598d.errors import UserError

# Files that a rank opens besides its connections: libraries, its data, its record, unknown connections to its port.
OTHER_FILES = 192
FIRST_FILES = 32  # of them at most are open before the ranks meet
# For each version of cgroups: the root of its folders, the files of limit and usage, and the row of its cache.
CGROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def needed_descriptors(rank: int, world_size: int) -> int:
    """Descriptors that a rank needs: gloo connects every pair of ranks, and rank 0 also serves each of them."""
    return (2 if rank == 0 else 1) * world_size + OTHER_FILES


def allow_descriptors(rank: int, world_size: int) -> None:
    """Raise this process's soft limit of open files to what its rank needs besides what it has inherited.

    Raises UserError where the hard limit is below that.
    """
    _allow(needed_descriptors(rank, world_size), f"rank {rank} of {world_size}")


def allow_workers(world_size: int) -> None:
    """The same for a process that is to start so many ranks: it keeps two pipes to each."""
    _allow(2 * world_size + OTHER_FILES, f"the starter of {world_size} ranks")


def _allow(more: int, who: str) -> None:
    needed = more + _inherited()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"{who} needs {needed} open files, and this process may have {hard} (ulimit -Hn): "
            f"raise that limit on its host, or start fewer ranks."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _inherited() -> int:
    """Descriptors beyond the first few that this process has open already, such as a fork's of those forked before."""
    try:
        return max(0, len(os.listdir("/proc/self/fd")) - FIRST_FILES)
    except OSError:  # not Linux
        return 0


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory that this process can take before the kernel swaps or kills, as far as the kernel says."""
    return min([psutil.virtual_memory().available, *_left_by_cgroups(root)])


def _left_by_cgroups(root: Path) -> Iterator[int]:
    """What each cgroup of this process, and each above it, leaves of its limit; nothing on other systems than Linux."""
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
            except (OSError, ValueError):  # no limit ("max"), or a container that does not show its own folder
                continue
