"""The device that a rank computes on, and which ranks compute on the same."""

from collections.abc import Sequence

import torch

from cos598d.errors import UserError


def choose_device(use_cuda: bool, index_on_host: int) -> torch.device:
    """This rank's device: the CPU, or with CUDA a GPU of those that this process sees, by its index on its host.

    A launcher may show every rank one GPU of its own, which each of them sees as its first. Where ranks see fewer GPUs
    than they are, they share them in turns.
    """
    if not use_cuda:
        return torch.device("cpu")
    device = torch.device("cuda", index_on_host % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def gpu_of(device: torch.device) -> str | None:
    """What is the same for two processes of a host exactly if they use the same GPU, its UUID; None for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def check_gpus_differ(gpus: Sequence[str], hosts: Sequence[str]) -> None:
    """Raise UserError, the same on every rank, where two ranks of a host have the same GPU, which nccl refuses.

    `gpus` and `hosts` are by rank: what `gpu_of` gives, and the name of the host.
    """
    first: dict[tuple[str, str], int] = {}
    for rank, place in enumerate(zip(hosts, gpus, strict=True)):
        other = first.setdefault(place, rank)
        if other != rank:
            raise UserError(
                f"rank {rank} has the same GPU as rank {other} ({place[1]}), and nccl needs one for each rank: "
                f"start as many ranks on a host as it has GPUs, or use --backend gloo."
            )
