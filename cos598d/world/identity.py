"""Who am I among the ranks? Rank, world size and rank 0's address, from the flags, torchrun, SLURM or MPI."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cos598d.errors import UsageError
from cos598d.world.network import DEFAULT_IP, DEFAULT_PORT

# Set by `launch.start_local_workers` for its workers: its process id (they end without it), and rank 0's bound socket.
LAUNCHER_PID, LISTENER = "COS598D_LAUNCHER_PID", "COS598D_LISTENER"
SECRET_VARIABLE = "COS598D_SECRET"  # what all ranks of a run know, and no other program
TORCHRUN = "TORCHELASTIC_RUN_ID"  # set only by torchrun's agent, for its workers
PARENT_PID = os.getppid()  # when this process started


@dataclass(frozen=True)
class Identity:
    """One process's place: its rank among world_size ranks, which meet at master_ip:master_port.

    Raises UsageError for values that contradict each other.
    """

    rank: int
    world_size: int
    master_ip: str = DEFAULT_IP
    master_port: int = DEFAULT_PORT
    source: str = "flags"  # flags, local, torchrun, environment (only torchrun's variables), srun, mpirun or alone
    store_is_served: bool = False  # torchrun's agent already serves a key-value store at master_ip:master_port
    attempt: str = "0"  # how often this host's ranks were restarted; other hosts may have other counts
    shares_terminal: bool = False  # started with others in one terminal: rank 0 prints for all
    one_host: bool = False  # the launcher reports that all ranks are on this host
    run_id: str = ""  # the launcher's name for this run, if it has one

    def __post_init__(self):
        if self.world_size < 1:
            raise UsageError(f"--world_size {self.world_size} is not valid. Give a number of at least 1.")
        if not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"rank {self.rank} does not exist with --world_size {self.world_size}. Give a rank from 0 to "
                f"{self.world_size - 1}."
            )
        if not 0 < self.master_port < 65536:
            raise UsageError(f"--master_port {self.master_port} is not a port. Give a number from 1 to 65535.")

    @property
    def endpoint(self) -> str:
        """The address where the ranks meet, as text."""
        return f"{self.master_ip}:{self.master_port}"

    @property
    def listening_ip(self) -> str:
        """The address at which rank 0 listens: master_ip, or only loopback if all ranks are on one host."""
        return DEFAULT_IP if self.one_host else self.master_ip

    @property
    def speaks(self) -> bool:
        """Whether this rank prints its progress: every rank with its own terminal, otherwise only rank 0."""
        return self.rank == 0 or not self.shares_terminal


def find_identity(
    world_size: int | None = None,
    rank: int | None = None,
    master_ip: str | None = None,
    master_port: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Identity | None:
    """This process's place in the world, from the flags (None if not given) and the environment.

    A rank flag wins. After that come the variables of torchrun, srun and mpirun. Without any of them the world is only
    this process, unless `world_size` asks for more. Then the result is None, and `start_local_workers` should start the
    ranks.

    Raises UsageError for a rank outside the world, a variable that is not a number, or a flag that contradicts the
    launcher's variables.
    """
    ip, port = master_ip or DEFAULT_IP, master_port or DEFAULT_PORT
    if rank is not None and rank != -1:  # the original assignment's scripts pass -1 for none
        if world_size is None:
            raise UsageError(f"--local_rank {rank} needs --world_size. Give the number of ranks.")
        return Identity(rank, world_size, ip, port)
    for name, read in (("torchrun", _from_torchrun), ("srun", _from_slurm), ("mpirun", _from_mpi)):
        found = read(environ)
        if found is None or (found.world_size == 1 and (world_size or 1) > 1):
            continue  # an interactive step with one task does not launch several ranks
        if world_size is not None and world_size != found.world_size:
            raise UsageError(
                f"--world_size {world_size} contradicts {name}, which started {found.world_size} ranks. "
                f"Leave the flag out or start {world_size}."
            )
        if not found.store_is_served:
            found = replace(found, master_ip=master_ip or found.master_ip, master_port=master_port or found.master_port)
        return found
    alone = Identity(0, 1 if world_size is None else world_size, ip, port, source="alone")
    return alone if alone.world_size == 1 else None


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    try:
        return int(environ[name] if default is None else environ.get(name, default))
    except KeyError:
        raise UsageError(
            f"the environment has no {name}, which this launcher should set. Start the ranks with the launcher "
            "again, or without it."
        ) from None
    except ValueError:
        raise UsageError(
            f"the environment's {name}={environ[name]!r} is not a number. Set it to one, or unset it."
        ) from None


def _from_torchrun(environ: Mapping[str, str]) -> Identity | None:
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    return Identity(
        _number(environ, "RANK"),
        _number(environ, "WORLD_SIZE"),
        environ.get("MASTER_ADDR", DEFAULT_IP),
        _number(environ, "MASTER_PORT", DEFAULT_PORT),
        # Our own launcher, torchrun, or another program that sets its variables.
        source="local" if LAUNCHER_PID in environ else "torchrun" if TORCHRUN in environ else "environment",
        store_is_served=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        shares_terminal=True,
        one_host=TORCHRUN in environ and environ.get("LOCAL_WORLD_SIZE") == environ["WORLD_SIZE"],
        run_id=environ.get(TORCHRUN, ""),
    )


def _from_slurm(environ: Mapping[str, str]) -> Identity | None:
    # Only srun sets SLURM_STEP_ID: a batch script has the other variables too.
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    size = _number(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "")
    is_one_node = environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES")) == "1"
    return Identity(
        _number(environ, "SLURM_PROCID"),
        size,
        environ.get("MASTER_ADDR") or ("" if is_one_node else first_host(nodes)) or DEFAULT_IP,
        _number(environ, "MASTER_PORT", DEFAULT_PORT),
        source="srun",
        shares_terminal=True,
        run_id=f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}",
    )


def first_host(nodes: str) -> str:
    """The first host of SLURM's list: "a[03-07,9],b" gives "a03", "" gives ""."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes).partition(",")[0]


def _from_mpi(environ: Mapping[str, str]) -> Identity | None:
    for rank, size, local_size in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ):
        if rank not in environ:
            continue
        world_size = _number(environ, size)
        several_hosts = local_size in environ and _number(environ, local_size) != world_size
        if several_hosts and "MASTER_ADDR" not in environ:
            raise UsageError(
                "mpirun started ranks on several hosts. Give rank 0's address (mpirun -x MASTER_ADDR=...)."
            )
        return Identity(
            _number(environ, rank),
            world_size,
            environ.get("MASTER_ADDR", DEFAULT_IP),
            _number(environ, "MASTER_PORT", DEFAULT_PORT),
            source="mpirun",
            shares_terminal=True,
            run_id=environ.get("PMIX_NAMESPACE", ""),
        )
    return None


def launcher_has_ended() -> bool:
    """Whether this process is a worker whose launcher, ours or torchrun's agent, has ended."""
    launcher = int(os.environ.get(LAUNCHER_PID) or (PARENT_PID if TORCHRUN in os.environ else 0))
    return launcher != 0 and os.getppid() != launcher
