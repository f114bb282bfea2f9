"""Where a rank works and with what: its device, its threads and its node, and the job that its launcher started."""

import os
import socket
from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from cos598d.errors import UsageError, UserError
from cos598d.terminal.printable import printable
from cos598d.world.identity import Identity

# torch.version's word for what it was built for -> how the names of such devices in /dev begin.
DEVICE_FILES = {"cuda": ("nvidia", "nvhost", "dxg"), "hip": ("kfd", "dxg"), "xpu": ("dri",)}
MOST_THREADS, THREADS_A_CORE = 64, 4  # of a rank, whichever is more on a host
AUTO_BACKEND = "auto"  # see `choose_backend`
# What SLURM's variables say of a job, by the names that the record gives it.
SLURM = {
    "job": "SLURM_JOB_ID",
    "name": "SLURM_JOB_NAME",
    "step": "SLURM_STEP_ID",
    "nodes": "SLURM_JOB_NODELIST",
    "partition": "SLURM_JOB_PARTITION",
    "requeues": "SLURM_RESTART_COUNT",
}
LAUNCHERS = ("torchrun", "srun", "mpirun")  # others than the user's shells, and this program itself
MOST_GROUPS = 8  # of ranks side by side on one node, in a line of the log


def may_have_gpu() -> bool:
    """Whether this process may find a GPU that torch can use, found out without a word to its driver.

    Not whether it does: the user may have hidden it, or be without the rights.
    """
    files = os.listdir("/dev") if os.path.isdir("/dev") else []
    wanted = [names for kind, names in DEVICE_FILES.items() if getattr(torch.version, kind, None)]
    return any(file.startswith(names) for names in wanted for file in files)


def choose_device(use_cuda: bool, index_on_host: int) -> torch.device:
    """This rank's device: the CPU, or with CUDA one of the GPUs that this process sees, by its index on its host.

    A launcher may show every rank one GPU of its own, which each of them sees as its first. Ranks that see fewer GPUs
    than there are ranks on the host share them in turn.
    """
    if not use_cuda:
        return torch.device("cpu")
    device = torch.device("cuda", index_on_host % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def gpu_of(device: torch.device) -> str | None:
    """The GPU's UUID, the same for two processes exactly if they use the same GPU; None for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def choose_backend(asked: str, gpus: Sequence[str | None], hosts: Sequence[Hashable]) -> str:
    """The backend of a run: `asked`, or for AUTO_BACKEND nccl if several ranks each have a GPU of their own, else gloo.

    `gpus[r]` and `hosts[r]` are rank r's, as in `check_gpus_differ`. The same on every rank.
    """
    if asked != AUTO_BACKEND:
        return asked
    has_own = None not in gpus and len(set(zip(hosts, gpus, strict=True))) == len(gpus)
    return "nccl" if has_own and len(gpus) > 1 else "gloo"


def check_gpus_differ(gpus: Sequence[str | None], hosts: Sequence[Hashable]) -> None:
    """Raise UserError, the same on every rank, where two ranks of a host have the same GPU, which nccl refuses.

    `gpus[r]` and `hosts[r]` are rank r's: what `gpu_of` returns, and its host.
    """
    first: dict[tuple[Hashable, str | None], int] = {}
    for rank, place in enumerate(zip(hosts, gpus, strict=True)):
        other = first.setdefault(place, rank)
        if other != rank:
            raise UserError(
                f"rank {rank} has the same GPU as rank {other} ({place[1]}), and nccl needs one for each rank. "
                f"Start as many ranks on a host as it has GPUs, or use --backend gloo."
            )


def count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_threads(threads: int | None) -> None:
    """Raise UsageError for more threads than a rank on this host can use: OpenMP ends a process that asks for them."""
    most = max(MOST_THREADS, THREADS_A_CORE * count_cores())
    if threads is not None and threads > most:
        raise UsageError(f"--threads {threads}: this host has {count_cores()} cores. Give at most {most}.")


def choose_threads(threads: int | None, ranks_on_host: int) -> int:
    """Give torch `threads` threads, or this rank's share of the host's cores (at least one); return their number."""
    chosen = threads or max(1, count_cores() // ranks_on_host)
    torch.set_num_threads(chosen)
    return chosen


def launcher_facts(identity: Identity, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Who started this rank: the launcher, its name for the run, its restarts, and the SLURM job around it, if any."""
    job = {name: environ.get(variable) for name, variable in SLURM.items()}
    return {
        "name": identity.source,
        "run": printable(identity.run_id) or None,
        "restarts": int(identity.attempt) if identity.attempt.isdecimal() else 0,
        "slurm": {name: value and printable(value) for name, value in job.items()} if job["job"] else None,
    }


def place_of(device: torch.device, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Where this rank works: its node by SLURM's name for it, else the host's, its device, and its GPU's UUID."""
    node = environ.get("SLURMD_NODENAME") or socket.gethostname()
    return {"node": printable(node), "device": str(device), "gpu": gpu_of(device)}


def places_in_words(facts: Mapping[str, Any], places: Sequence[Mapping[str, Any]]) -> str:
    """One line of `launcher_facts` and every rank's place: "srun, job 17.0: rank 0 on n1, ranks 1-2 on n2"."""
    job = facts["slurm"]
    words = [facts["name"]]
    if job:
        words.append(f"job {job['job']}" + (f".{job['step']}" if facts["name"] == "srun" else ""))
        if job["requeues"] not in (None, "0"):
            words.append(f"requeue {job['requeues']}")
    elif facts["run"] not in (None, "none"):  # torchrun's own word for a run without a name
        words.append(f"run {facts['run']}")
    if facts["restarts"]:
        words.append(f"restart {facts['restarts']}")
    groups = [list(group) for _, group in groupby(enumerate(places), key=lambda place: place[1]["node"])]
    shown = [_group_in_words(group) for group in groups[:MOST_GROUPS]]
    more = f" and {len(groups) - MOST_GROUPS} more nodes" if len(groups) > MOST_GROUPS else ""
    return f"{', '.join(words)}: {', '.join(shown)}{more}"


def _group_in_words(group: Sequence[tuple[int, Mapping[str, Any]]]) -> str:
    """ "rank 0 on n1", "ranks 0-3 on n1 (cuda:0, cuda:1, cuda:0, cuda:1)": neighbours that share a node."""
    first, last = group[0][0], group[-1][0]
    ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
    devices = [place["device"] for _, place in group]
    gpus = f" ({', '.join(devices)})" if any(device != "cpu" for device in devices) else ""
    return f"{ranks} on {group[0][1]['node']}{gpus}"
