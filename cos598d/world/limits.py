"""How many files a process may have open, against what a rank of a large world needs."""

import resource

from cos598d.errors import UserError

# What a rank opens besides its connections: libraries, its data, its record, strangers at its door.
OTHERS = 192


def needed_descriptors(rank: int, world_size: int) -> int:
    """Descriptors that a rank needs: gloo connects every pair of ranks, and rank 0 serves each of them besides."""
    return (2 if rank == 0 else 1) * world_size + OTHERS


def allow_descriptors(rank: int, world_size: int) -> None:
    """Raise this process's soft limit of open files to what its rank needs.

    Raises UserError where the hard limit is below that.
    """
    needed = needed_descriptors(rank, world_size)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"rank {rank} of {world_size} needs {needed} open files, and this process may have {hard} (ulimit -Hn): "
            f"raise that limit on its host, or start fewer ranks."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
