"""Where the ranks of a run work: the launcher's job, and each rank's node and GPU, for the log and the record."""

import os
import socket
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from cos598d.terminal.printable import printable
from cos598d.world.devices import gpu_of
from cos598d.world.identity import Identity

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
