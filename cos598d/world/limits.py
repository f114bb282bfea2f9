"""What this process takes from its host: open files, and memory, which it keeps for the next step."""

import ctypes
import os
import resource
from collections.abc import Iterator, Mapping
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
# malloc.h's M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD, and what they are given. Older libraries take 32 MiB at
# most for the last.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = (-1, 2**31 - 1), (-2, 64 << 20), (-3, 1 << 30)
LARGEST_OF_OLD = 32 << 20


def allow_descriptors(rank: int, world_size: int) -> None:
    """Raise this process's soft limit of open files to what its rank needs besides what it has inherited.

    gloo connects every pair of ranks, and rank 0 also serves each of them. Raises UserError if the hard limit is
    below that.
    """
    _allow((2 if rank == 0 else 1) * world_size, f"rank {rank} of {world_size}")


def allow_workers(world_size: int) -> None:
    """The same for a process that is to start so many ranks: it keeps two pipes to each."""
    _allow(2 * world_size, f"the starter of {world_size} ranks")


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


def malloced_bytes() -> int | None:
    """Bytes that this process has from malloc now, without the holes between them; None where malloc does not tell."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):  # another C library than glibc 2.33 or newer
        return None
    library.mallinfo2.restype = _MallocFacts
    found = library.mallinfo2()
    return found.uordblks + found.hblkhd


class _MallocFacts(ctypes.Structure):
    """malloc.h's struct mallinfo2: uordblks are the bytes in use in its heaps, hblkhd those of blocks of their own."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Have glibc's malloc keep what is freed in blocks of up to a GiB; whether it does from now on.

    A step frees its activations and gradients, and the next one takes them again. Without this malloc gives back the
    end of its heap each time, and any block of more than 32 MiB, such as a word embedding's gradient. The kernel then
    hands out the same pages again, each of them cleared, by a fault of its own: for MiniLM thousands a step. What a
    process holds in a step it then holds between two steps, too.

    Nothing is changed where the user has set malloc's variables (MALLOC_ARENA_MAX, GLIBC_TUNABLES), nor where the C
    library has no such options.
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
