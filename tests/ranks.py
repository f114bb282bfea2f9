"""Ranks in processes of this machine: a world starts once, and runs many cases."""

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_ranks(ranks: int, function: Callable, *arguments: Any, seconds: float = 60.0) -> list[Any]:
    """What `function(rank, ranks, *arguments)` returns on each rank of a gloo group: tensors, numbers and words.

    A rank's exception is raised here, with its traceback. The function is one of a module's own.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _on_a_rank, (ranks, folder, function, arguments, seconds), nprocs=ranks, start_method="forkserver"
        )
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(ranks)]


def _on_a_rank(
    rank: int, ranks: int, folder: str, function: Callable, arguments: tuple[Any, ...], seconds: float
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=seconds))
    try:
        torch.save(function(rank, ranks, *arguments), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
