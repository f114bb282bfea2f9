"""What a rank computes with: its device and its threads."""

import os
from collections.abc import Hashable, Sequence
from pathlib import Path

import torch

from cos598d.errors import UsageError, UserError

# torch.version's word for what it was built for -> how the names of such devices in /dev begin.
DEVICE_FILES = {"cuda": ("nvidia", "nvhost", "dxg"), "hip": ("kfd", "dxg"), "xpu": ("dri",)}
MOST_THREADS, THREADS_A_CORE = 64, 4  # of a rank, whichever is more on a host
PROCESSOR = Path("/proc/cpuinfo")
# The kernel's words for the instructions by which a processor multiplies in bf16; the faster ones first.
BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")


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


def bf16_instructions() -> str | None:
    """The instructions of this processor that multiply in bf16, by the kernel's word; None where it has none, or where
    there is no telling."""
    try:
        lines = PROCESSOR.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return next((name for name in BF16_INSTRUCTIONS if name in flags), None)


def gpu_of(device: torch.device) -> str | None:
    """The GPU's UUID, the same for two processes exactly if they use the same GPU; None for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def check_gpus_differ(gpus: Sequence[str], hosts: Sequence[Hashable]) -> None:
    """Raise UserError, the same on every rank, where two ranks of a host have the same GPU, which nccl refuses.

    `gpus[r]` and `hosts[r]` are rank r's: what `gpu_of` returns, and its host.
    """
    first: dict[tuple[Hashable, str], int] = {}
    for rank, place in enumerate(zip(hosts, gpus, strict=True)):
        other = first.setdefault(place, rank)
        if other != rank:
            raise UserError(
                f"rank {rank} has the same GPU as rank {other} ({place[1]}), and nccl needs one for each rank: "
                f"start as many ranks on a host as it has GPUs, or use --backend gloo."
            )


def count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_threads(threads: int | None) -> None:
    """Raise UsageError for more threads than a rank on this host can use: OpenMP ends a process that asks for them."""
    most = max(MOST_THREADS, THREADS_A_CORE * count_cores())
    if threads is not None and threads > most:
        raise UsageError(f"--threads {threads}: this host has {count_cores()} cores, so give at most {most}.")


def choose_threads(threads: int | None, ranks_on_host: int) -> int:
    """Give torch `threads` threads, or this rank's share of the host's cores (at least one); return their number."""
    chosen = threads or max(1, count_cores() // ranks_on_host)
    torch.set_num_threads(chosen)
    return chosen
