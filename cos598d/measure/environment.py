"""The environment of a run: versions, processors, device, and the state of the code."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from cos598d.errors import UserError
from cos598d.records.schema import Network

PACKAGES = ("torch", "pytorch-transformers", "numpy", "tokenizers", "safetensors", "huggingface_hub", "scikit-learn")


def describe_environment(device: torch.device, backend: str, threads: int, ranks_on_host: int) -> dict[str, Any]:
    """The facts without which a figure means little, for `environment.json`. Memory is in bytes."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "threads_per_rank": threads,
        "ranks_on_host": ranks_on_host,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "tf32": computes_in_tf32(device),
        "backend": backend,
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        # The links of an emulated cluster (rate, delay); None on real ones.
        "network": network_facts(),
        "versions": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "commit": _commit(),
    }


def computes_in_tf32(device: torch.device) -> bool:
    """Whether products of float32 matrices are rounded to TF32, an option of GPUs; always False on a CPU."""
    if device.type != "cuda":
        return False
    override = os.environ.get("NVIDIA_TF32_OVERRIDE")  # cuBLAS follows it, whatever torch's setting is
    return override == "1" if override in ("0", "1") else torch.get_float32_matmul_precision() != "highest"


def network_facts() -> dict[str, Any] | None:
    """An emulated cluster's links, which it tells the programs on its hosts in COS598D_NETWORK; None without one.

    Raises UserError for a value that our clusters do not set.
    """
    try:
        found = msgspec.json.decode(os.environ.get("COS598D_NETWORK", "null"), type=Network | None)
    except msgspec.DecodeError as error:
        raise UserError(
            f"the environment's COS598D_NETWORK is not of a cluster ({error}). Leave it out, or start with "
            "`cluster exec`."
        ) from None
    return None if found is None else msgspec.structs.asdict(found)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """The processor's name, as the kernel reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The checkout's commit, with "+" if files differ from it; None outside a checkout or without git."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    words = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
