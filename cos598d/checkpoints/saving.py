"""Saving a training, and continuing it: its tensors between the ranks and rank 0, which has the files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from cos598d.checkpoints.folder import Found, Training, write
from cos598d.comm.group import Ranks
from cos598d.errors import first_line
from cos598d.parallel import Parallel
from cos598d.plan import Position
from cos598d.records.conventions import STATE
from cos598d.state import OF_MODEL
from cos598d.terminal.words import number_of

_OF_SYNC, _CPU, _CUDA = "sync/", "random/cpu", "random/cuda"
_Tensors = dict[str, torch.Tensor]


@dataclass
class Checkpoints:
    """The checkpoints of a run. Every rank creates one and makes the same calls, between two steps.

    1. `restore` continues from the checkpoint that the run resumes from: rank 0 reads it and sends it to all.
    2. `save` gathers the whole state on rank 0, which writes it. Training waits meanwhile. If the disk refuses, only
       that checkpoint is lost, and rank 0 warns.

    With the same ranks, sync and options every rank continues to the last bit: also its random numbers, and what its
    sync keeps. On other ranks dropout draws anew, and what belongs to single ranks is lost.

    describe: writes a model's other files. sync: the sync's name and options. found: what this run resumes from.
    facts: what must be equal in every attempt of a run.
    """

    folder: Path
    ranks: Ranks
    keep: int
    describe: Callable[[Path], None]
    sync: dict[str, Any]
    found: Found | None
    warn: Callable[[str], None]
    facts: dict[str, Any]

    def save(self, parallel: Parallel, scaler: ShardedGradScaler, at: Position, gathered: Callable[[], None]) -> None:
        """Save the training after `at`. Every rank calls it; `gathered` is called when all is sent."""
        ranks, tensors = self.ranks, {}
        for key, tensor in parallel.state():
            if ranks.rank == 0:
                tensors[key] = _on_the_host(tensor)
        own = {f"{_OF_SYNC}{name}": _on_the_host(tensor) for name, tensor in parallel.sync.own_state().items()}
        own[_CPU] = torch.get_rng_state()
        if ranks.device.type == "cuda":
            own[_CUDA] = torch.cuda.get_rng_state(ranks.device)
        for rank in range(ranks.world_size):
            tensors |= {f"rank{rank}/{name}": tensor for name, tensor in self._from(rank, own).items()}
        gathered()
        if ranks.rank:
            return
        training = Training(4, ranks.world_size, self.sync, at, scaler.state_dict(), self.facts)
        try:
            write(self.folder, training, tensors, self.describe, self.keep)
        except (OSError, SafetensorError) as error:
            self.warn(
                f"the checkpoint of iteration {at.iteration} cannot be written to {self.folder} "
                f"({first_line(error)}). Training continues without it. Make room there."
            )

    def restore(self, parallel: Parallel, scaler: ShardedGradScaler, kinds: Sequence[str]) -> tuple[Training, str]:
        """Continue from the checkpoint, on every rank, before the first step. Return what it says, and a sentence.

        kinds: the names of what the optimizer remembers; other tensors were another optimizer's. Raises UserError, the
        same on every rank, if it is another model's checkpoint.
        """
        found, ranks = self.found, self.ranks
        assert found is not None
        training, own = found.training, dict[str, torch.Tensor]()
        said = f"resumes after iteration {training.position.iteration}, from {found.path}"
        state = self._from(0, _of_kinds(found.tensors, (*OF_MODEL, *kinds)))
        parallel.load_state(state)
        for rank in range(ranks.world_size) if ranks.world_size == training.ranks else ():
            its = self._from(0, _of_kinds(found.tensors, [f"rank{rank}"]))
            own = {key.partition("/")[2]: t for key, t in its.items()} if rank == ranks.rank else own
        if own:
            torch.set_rng_state(own[_CPU].cpu())
        else:
            more = number_of(ranks.world_size, "rank")
            said += f"; with {more} in place of {training.ranks}, so random numbers differ"
        if _CUDA in own and ranks.device.type == "cuda":
            torch.cuda.set_rng_state(own[_CUDA].cpu(), ranks.device)
        if own and self.sync == training.sync:
            kept = {key.removeprefix(_OF_SYNC): t for key, t in own.items() if key.startswith(_OF_SYNC)}
            parallel.sync.load_own_state(kept)
        if not (parallel.sync.keeps_optimizer_state and _of_kinds(state, kinds)):
            said += "; what the optimizer remembers starts from scratch"
        if scaler.is_enabled() and training.scaler:
            scaler.load_state_dict(training.scaler)
        found.tensors = {}
        return training, said

    def _from(self, source: int, tensors: Mapping[str, torch.Tensor]) -> _Tensors:
        """The rank's tensors, on every rank. Every rank calls it. They are where collectives send from."""
        forms = {key: [list(t.shape), str(t.dtype).removeprefix("torch.")] for key, t in tensors.items()}
        forms = self.ranks.exchange(forms)[source]
        device = self.ranks.device if self.ranks.backend == "nccl" else torch.device("cpu")
        found = {key: torch.empty(shape, dtype=getattr(torch, t), device=device) for key, (shape, t) in forms.items()}
        for key, tensor in found.items():
            if self.ranks.rank == source:
                tensor.copy_(tensors[key])
            with self.ranks.ledger.naming(key, STATE):
                dist.broadcast(tensor.view(-1).view(torch.uint8), source)
        return found


def _of_kinds(tensors: Mapping[str, torch.Tensor], kinds: Sequence[str]) -> _Tensors:
    return {key: tensor for key, tensor in tensors.items() if key.partition("/")[0] in kinds}


def _on_the_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
