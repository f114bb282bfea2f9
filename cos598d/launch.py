"""Who am I among the workers: rank, world size and meeting point, from flags, torchrun, SLURM or MPI; local workers."""

import logging
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cos598d.errors import UsageError, UserError

DEFAULT_IP = "127.0.0.1"
DEFAULT_PORT = 6585
# Set by `start_local_workers` for its children: they leave when this process is gone.
LAUNCHER_PID = "COS598D_LAUNCHER_PID"


@dataclass(frozen=True)
class Identity:
    """One worker's place: its rank among world_size ranks that meet at master_ip:master_port."""

    rank: int
    world_size: int
    master_ip: str = DEFAULT_IP
    master_port: int = DEFAULT_PORT
    source: str = "flags"  # flags, torchrun, srun, mpirun or alone
    store_is_served: bool = False  # torchrun's agent already serves the key-value store at the meeting point
    attempt: str = "0"  # torchrun's restart count: a restarted world meets under new keys
    shares_terminal: bool = False  # started with others in one terminal: rank 0 speaks for all

    def __post_init__(self):
        if self.world_size < 1:
            raise UsageError(f"--world_size {self.world_size}: a world has at least 1 rank.")
        if not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"rank {self.rank} is outside the world: with --world_size {self.world_size} "
                f"the ranks are 0 to {self.world_size - 1}."
            )
        if not 0 < self.master_port < 65536:
            raise UsageError(f"--master_port {self.master_port} is not a port: give a number from 1 to 65535.")

    @property
    def speaks(self) -> bool:
        """Whether this rank prints its progress: every rank with a terminal of its own, else rank 0 alone."""
        return self.rank == 0 or not self.shares_terminal


def find_identity(
    world_size: int | None = None,
    rank: int | None = None,
    master_ip: str | None = None,
    master_port: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Identity | None:
    """This process's place in the world, from the flags given (None where not) and the environment.

    A rank flag wins; then torchrun's variables, srun's, mpirun's. Without any of them the world is this process
    alone, unless `world_size` asks for more: then the answer is None, and `start_local_workers` is to start them.

    Raises UsageError for a rank outside the world, a variable that is not a number, or a flag that contradicts
    what the launcher said.
    """
    ip, port = master_ip or DEFAULT_IP, master_port or DEFAULT_PORT
    if rank is not None and rank != -1:  # -1 is the course's word for none
        if world_size is None:
            raise UsageError(f"--local_rank {rank} needs --world_size: how many ranks are there in all?")
        return Identity(rank, world_size, ip, port)
    for name, read in (("torchrun", _from_torchrun), ("srun", _from_slurm), ("mpirun", _from_mpi)):
        found = read(environ)
        if found is None or (found.world_size == 1 and (world_size or 1) > 1):
            continue  # an interactive step of one task is no launcher of several ranks
        if world_size is not None and world_size != found.world_size:
            raise UsageError(
                f"--world_size {world_size} contradicts {name}, which started {found.world_size} ranks: "
                f"leave the flag out or start {world_size}."
            )
        if not found.store_is_served:
            found = replace(found, master_ip=master_ip or found.master_ip, master_port=master_port or found.master_port)
        return found
    if world_size is None or world_size == 1:
        return Identity(0, 1, ip, port, source="alone")
    Identity(0, world_size, ip, port)  # for its checks
    return None


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except KeyError:
        raise UsageError(f"the environment has no {name}, which this launcher should set.") from None
    except ValueError:
        raise UsageError(f"the environment's {name}={environ[name]!r} is not a number.") from None


def _from_torchrun(environ: Mapping[str, str]) -> Identity | None:
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    return Identity(
        _number(environ, "RANK"),
        _number(environ, "WORLD_SIZE"),
        environ.get("MASTER_ADDR", DEFAULT_IP),
        _number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else DEFAULT_PORT,
        source="torchrun",
        store_is_served=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        shares_terminal=True,
    )


def _from_slurm(environ: Mapping[str, str]) -> Identity | None:
    # SLURM_STEP_ID stands only where srun started the process: a batch script has the other variables too.
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    size = _number(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "")
    return Identity(
        _number(environ, "SLURM_PROCID"),
        size,
        environ.get("MASTER_ADDR") or first_host(nodes) or DEFAULT_IP,
        _number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else DEFAULT_PORT,
        source="srun",
        shares_terminal=True,
    )


def first_host(nodes: str) -> str:
    """The first host of SLURM's list: "a[03-07,9],b" gives "a03", "" gives ""."""
    match = re.match(r"([^,\[]*)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in match.groups())


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
                "mpirun started ranks on several hosts: give rank 0's address (mpirun -x MASTER_ADDR=...)."
            )
        return Identity(
            _number(environ, rank),
            world_size,
            environ.get("MASTER_ADDR", DEFAULT_IP),
            _number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else DEFAULT_PORT,
            source="mpirun",
            shares_terminal=True,
        )
    return None


def start_local_workers(world_size: int, master_port: int | None, arguments: Sequence[str]) -> int:
    """Start `world_size` workers on this host through torch's own launcher and wait for them; return the exit code.

    Every worker runs this same program with `arguments`. When one fails, the launcher takes the others down.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The workers say what went wrong, each in one sentence; the launcher's own report would bury it.
    logging.disable(logging.CRITICAL)
    if master_port:
        check_port(master_port)
    logs = tempfile.TemporaryDirectory(prefix="cos598d-launch-")  # torch's launcher would leave its own behind
    config = LaunchConfig(
        logs_specs=DefaultLogsSpecs(log_dir=logs.name),
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{master_port or 0}",
        run_id=f"cos598d-{os.getpid()}",
        max_restarts=0,
        # Long enough for the workers to tell each other, and the user, why they stop.
        monitor_interval=0.5,
        local_addr="127.0.0.1",
    )
    os.environ[LAUNCHER_PID] = str(os.getpid())
    # torch's launcher would warn that it chose this; the number of threads is set anew once the ranks have met.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        elastic_launch(config, sys.executable)("-u", *program(), *arguments)
    except ChildFailedError as error:
        failure = error.get_first_failure()[1]
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            print(f"rank {failure.local_rank} was ended by {name}.", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as stopped:
        print(f"stopped by {stopped.sigval.name}.", file=sys.stderr)
        return 128 + stopped.sigval
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        logs.cleanup()
    return 0


def program() -> list[str]:
    """The words that start this program again: a script's path, or `-m cos598d` where it was started as a module."""
    started = Path(sys.argv[0])
    return ["-m", "cos598d"] if started.name == "__main__.py" else [str(started)]


def check_port(port: int) -> None:
    """Raise UserError if this process cannot listen on `port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except PermissionError:
            raise UserError(
                f"port {port} needs rights that this process has not: choose another --master_port."
            ) from None
        except OSError:
            raise UserError(
                f"port {port} on this host is taken by another program: "
                f"choose another --master_port, the same on every rank."
            ) from None


def check_address(address: str) -> None:
    """Raise UserError if `address` is not this host's own, as rank 0's must be."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0]
    except socket.gaierror:
        raise UserError(f"--master_ip {address} is not a host that this one knows.") from None
    with socket.socket(family, kind) as probe:
        try:
            probe.bind(place)
        except OSError:
            raise UserError(
                f"--master_ip {address} is not an address of this host, where rank 0 runs: give one of its own."
            ) from None


def set_threads(threads: int | None, ranks_on_host: int) -> int:
    """Give this rank `threads`, or its share of the host's cores and at least one; return the number."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    chosen = threads or max(1, cores // ranks_on_host)
    torch.set_num_threads(chosen)
    return chosen
