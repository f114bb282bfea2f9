"""Which ranks write into rank 0's folder themselves, and how the others' parts of a checkpoint reach rank 0."""

import contextlib
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from cos598d.checkpoints.layout import probe_name
from cos598d.checkpoints.snapshot import CheckpointPart, HostMemory
from cos598d.checkpoints.tensors import as_bytes
from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import dtype_name
from cos598d.errors import UserError
from cos598d.records.conventions import STATE


def find_far_ranks(folder: Path, comm: Communicator, prepare: Callable[[], None]) -> tuple[str, list[int]]:
    """A token that all ranks share and nobody had before, and the ranks that cannot write where rank 0 does.

    Rank 0 calls `prepare` and makes a folder with a random name in `folder`; a rank is far if rank 0 does not see the
    file that this rank tried to write there. Every rank must call it. Raises UserError, the same on every rank, with
    the sentence of a UserError in `prepare`, or if rank 0 cannot write.
    """
    first: dict[str, str] = {}
    if comm.rank == 0:
        try:
            prepare()
            first["token"] = secrets.token_hex(8)
            (folder / probe_name(first["token"])).mkdir()
        except UserError as error:
            first["refused"] = str(error)
        except OSError as error:
            first["refused"] = f"no checkpoint can be kept in {folder} ({error.strerror}): choose another --output_dir."
    first = comm.exchange(first)[0]
    if "refused" in first:
        raise UserError(first["refused"])
    probe = folder / probe_name(first["token"])
    with contextlib.suppress(OSError):  # this rank has no such folder, or may not write there
        (probe / str(comm.rank)).touch()
    comm.exchange("whoever can has written")
    far: list[int] = []
    if comm.rank == 0:
        far = [rank for rank in range(1, comm.world_size) if not (probe / str(rank)).exists()]
        shutil.rmtree(probe, ignore_errors=True)
    return first["token"], comm.exchange(far)[0]


def send_parts(part: CheckpointPart, far: list[int], comm: Communicator, memory: HostMemory) -> list[CheckpointPart]:
    """On rank 0 the parts of the `far` ranks, which send theirs to it; nothing elsewhere. Every rank must call it.

    The tensors land in `memory`, and are overwritten by the next ones.
    """
    memory.wait()
    contents = comm.exchange(_describe(part) if comm.rank in far else None)
    found = []
    for rank in far:
        if comm.rank == 0:
            theirs = CheckpointPart(metadata=contents[rank]["metadata"], texts=contents[rank]["texts"])
            for file, tensors in contents[rank]["tensors"].items():
                theirs.tensors[file] = {
                    name: memory.empty(f"{rank}/{name}", tuple(shape), getattr(torch, dtype))
                    for name, (dtype, shape) in tensors.items()
                }
            found.append(theirs)
            transfer(comm, theirs.tensors, source=rank, target=0)
        elif comm.rank == rank:
            transfer(comm, part.tensors, source=rank, target=0)
    return found


def transfer(comm: Communicator, files: Mapping[str, Mapping[str, torch.Tensor]], *, source: int, target: int) -> None:
    """Send the source's tensors, on the host, into the target's of the same names; both call it, nobody else."""
    for file, tensors in files.items():
        for name, tensor in tensors.items():
            host = as_bytes(tensor)
            # nccl sends what lies on a device.
            travelling = host if comm.backend == "gloo" else host.to(comm.device)
            with comm.composed("send", travelling, f"{file}/{name}", purpose=STATE) as call:
                if comm.rank == source:
                    call.swap(sends=[(travelling, target)])
                else:
                    call.swap(receives=[(travelling, source)])
            if comm.rank == target and travelling is not host:
                host.copy_(travelling)


def _describe(part: CheckpointPart) -> dict[str, Any]:
    tensors = {
        file: {name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in named.items()}
        for file, named in part.tensors.items()
    }
    return {"tensors": tensors, "metadata": part.metadata, "texts": part.texts}
