"""How much memory this process can still have: what the host has free, or less where a cgroup limits it."""

from collections.abc import Iterator
from pathlib import Path

import psutil

# For each version of cgroups: under which root its folders lie, its limit, what is used, and what of that is a cache.
VERSIONS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be had without swapping and without waking the out-of-memory killer, as far as the kernel says."""
    return min([psutil.virtual_memory().available, *_left_by_cgroups(root)])


def _left_by_cgroups(root: Path) -> Iterator[int]:
    """What each cgroup that this process is in, and each above it, leaves of its limit; nothing outside of Linux."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, place = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        above, limit, used, cache = VERSIONS[0 if number == "0" else 1]
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
