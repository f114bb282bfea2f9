"""The flags that say where a rank stands: how many there are, which one it is, where they meet."""

import argparse
from dataclasses import dataclass

from cos598d.config import RANKS
from cos598d.fields import flag, flags_of
from cos598d.world.identity import SILENCE_SECONDS, Identity, find_identity
from cos598d.world.network import DEFAULT_IP, DEFAULT_PORT


@dataclass(frozen=True)
class RankFlags:
    """What `find_identity` takes; None leaves it to the launcher, or to the default."""

    world_size: int | None = flag(None, "ranks in all; without --local_rank, they are started here", group=RANKS)
    local_rank: int | None = flag(
        None, "this process's rank in the world, from 0 (torchrun, srun and mpirun say it themselves)", group=RANKS
    )
    master_ip: str | None = flag(None, f"address of rank 0 (default: {DEFAULT_IP})", group=RANKS, metavar="ADDRESS")
    master_port: int | None = flag(None, f"port where the ranks meet (default: {DEFAULT_PORT})", group=RANKS)
    secret: str | None = flag(
        None,
        "file with a secret that every rank must know (else $COS598D_SECRET; one host needs none)",
        group=RANKS,
        metavar="FILE",
    )
    silence_seconds: int | None = flag(
        None,
        f"a host counts as lost when nothing has been heard from it for so many seconds (default: {SILENCE_SECONDS})",
        group=RANKS,
    )


def identity_from(options: argparse.Namespace) -> Identity | None:
    """This process's place in the world, as `find_identity` says; None: the ranks are to be started here."""
    return find_identity(*(getattr(options, name) for name in flags_of(RankFlags)))
