"""The flags of a rank: how many ranks there are, which one it is, and where their rendezvous is."""

from dataclasses import astuple, dataclass

from cos598d.config import RANKS
from cos598d.errors import UsageError
from cos598d.terminal.fields import check_flags, flag, flags_of
from cos598d.world.identity import SILENCE_SECONDS, Identity, find_identity
from cos598d.world.network import DEFAULT_IP, DEFAULT_PORT


@dataclass(frozen=True)
class RankFlags:
    """The arguments of `find_identity`; None leaves one to the launcher, or to the default."""

    world_size: int | None = flag(None, "number of ranks; without --local_rank, start them all here", group=RANKS)
    local_rank: int | None = flag(None, "this process's rank, from 0 (torchrun, srun and mpirun set it)", group=RANKS)
    master_ip: str | None = flag(None, f"address of rank 0 (default: {DEFAULT_IP})", group=RANKS, metavar="ADDRESS")
    master_port: int | None = flag(None, f"port of the rendezvous on rank 0 (default: {DEFAULT_PORT})", group=RANKS)
    secret: str | None = flag(
        None,
        "file with the secret that all ranks share (else $COS598D_SECRET; not needed on one host)",
        group=RANKS,
        metavar="FILE",
    )
    silence_seconds: int | None = flag(
        None,
        f"seconds of silence after which a host counts as lost (default: {SILENCE_SECONDS})",
        group=RANKS,
    )


@dataclass(frozen=True)
class StarterFlags:
    """Flags of a command that starts the ranks itself."""

    max_restarts: int = flag(
        0,
        "restart failed local ranks up to N times, from the newest checkpoint",
        group=RANKS,
        least=0,
    )


def restarts_from(asked: int | None, identity: Identity | None) -> int:
    """How often to restart ranks that fail: --max_restarts as `asked`, 0 by default.

    Raises UsageError if a launcher has started this rank.
    """
    flags_of(StarterFlags)["max_restarts"].check("max_restarts", asked)
    if asked and identity is not None and identity.source != "local":
        raise UsageError(
            f"--max_restarts {asked} is for a command that starts the ranks itself: with --world_size N, without "
            "--local_rank. Leave it out, and let the ranks' launcher restart them."
        )
    return asked or 0


def identity_from(flags: RankFlags) -> Identity | None:
    """This process's identity from `find_identity`; None if this process has to start the ranks."""
    check_flags(flags)
    return find_identity(*astuple(flags))
