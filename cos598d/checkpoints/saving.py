"""Saving a training, and continuing it: its tensors between the ranks and rank 0, which has the files."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from cos598d.checkpoints.folder import FORMAT, Damaged, Found, Training, of_rank, place_of, read, write
from cos598d.checkpoints.stopping import Best
from cos598d.comm.group import Ranks
from cos598d.errors import first_line
from cos598d.parallel import Parallel
from cos598d.plan import Position
from cos598d.records.conventions import STATE
from cos598d.state import OF_MODEL, load_model
from cos598d.terminal.words import number_of

_OF_SYNC, _CPU, _CUDA = "sync/", "random/cpu", "random/cuda"
_Tensors = dict[str, torch.Tensor]


class Checkpoints:
    """The checkpoints of a run. Every rank creates one and makes the same calls, between two steps.

    1. `restore` continues from the checkpoint that the run resumes from: rank 0 reads it and sends it to all.
    2. `save` gathers the whole state on rank 0, which writes it. Training waits meanwhile. If the disk refuses, only
       that checkpoint is lost, and rank 0 warns.
    3. `load_best` loads the weights of the best evaluation.

    With the same ranks, sync and options every rank continues to the last bit: also its random numbers, and what its
    sync keeps. On other ranks dropout draws anew, and what belongs to single ranks is lost.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        keep: int,
        describe: Callable[[Path], None],
        sync: Mapping[str, Any],
        found: Found | None,
        warn: Callable[[str], None],
    ):
        """`sync` is the sync's name and options. `found` is the checkpoint that this run resumes from."""
        self.folder, self.found = folder, found
        self._ranks, self._keep, self._describe, self._warn, self._sync = ranks, keep, describe, warn, dict(sync)
        #: The iteration of the newest checkpoint, on rank 0; None before the first.
        self.newest: int | None = found.training.iteration if found else None

    def save(
        self,
        parallel: Parallel,
        scaler: ShardedGradScaler,
        position: Position,
        best: Best,
        facts: Mapping[str, Any],
        gathered: Callable[[], None] = lambda: None,
    ) -> None:
        """Save the training after `position`. Every rank calls it; `gathered` is called when all is sent."""
        ranks, tensors, iteration = self._ranks, {}, position.iteration
        for key, tensor in parallel.state():
            if ranks.rank == 0:
                tensors[key] = _on_the_host(tensor)
        kept = {f"{_OF_SYNC}{name}": _on_the_host(tensor) for name, tensor in parallel.sync.own_state().items()}
        kept[_CPU] = torch.get_rng_state()
        if ranks.device.type == "cuda":
            kept[_CUDA] = torch.cuda.get_rng_state(ranks.device)
        own = [kept] + [self._move(kept, rank, to=0) for rank in range(1, ranks.world_size)]
        gathered()
        if ranks.rank:
            return
        of_scaler = scaler.state_dict()
        training = Training(FORMAT, iteration, ranks.world_size, self._sync, position, best, of_scaler, dict(facts))
        try:
            write(self.folder, training, tensors, own, self._describe, self._keep)
            self.newest = iteration
        except OSError as error:
            stands = "there is none yet" if self.newest is None else f"that of iteration {self.newest} is complete"
            self._warn(
                f"the checkpoint of iteration {iteration} cannot be written to {self.folder} "
                f"({error.strerror or first_line(error)}). Training continues, and {stands}. Make room there."
            )

    def restore(self, parallel: Parallel, scaler: ShardedGradScaler, kinds: Sequence[str]) -> tuple[Training, str]:
        """Continue from the checkpoint, on every rank, before the first step. Return what it says, and a sentence.

        kinds: the names of what the optimizer remembers; other tensors were another optimizer's. Raises UserError, the
        same on every rank, if it is another model's checkpoint.
        """
        found, ranks = self.found, self._ranks
        assert found is not None
        training, said = found.training, f"resumes after iteration {found.training.iteration}, from {found.path}"
        own: _Tensors = {}
        with ranks.ledger.unheard():  # an uninterrupted training would not have sent this
            state = self._move(_of_kinds(found.tensors, (*OF_MODEL, *kinds)))
            parallel.load_state(state)
            for rank in range(training.ranks) if ranks.world_size == training.ranks else ():
                kept = load_file(of_rank(found.path, rank)) if ranks.rank == 0 else {}
                its = self._move(kept, to=rank) if rank else kept
                own = its if rank == ranks.rank else own
        if not own:
            said += f"; with {number_of(ranks.world_size, 'rank')} in place of {training.ranks}"
        if not (parallel.sync.keeps_optimizer_state and _of_kinds(state, kinds)):
            said += "; what the optimizer remembers starts from scratch"
        if scaler.is_enabled() and training.scaler:
            scaler.load_state_dict(training.scaler)
        if own and self._sync == training.sync:
            kept = {key.removeprefix(_OF_SYNC): t for key, t in own.items() if key.startswith(_OF_SYNC)}
            parallel.sync.load_own_state(kept)
        if own:
            torch.set_rng_state(own[_CPU].cpu())
        if _CUDA in own and ranks.device.type == "cuda":
            torch.cuda.set_rng_state(own[_CUDA].cpu(), ranks.device)
        found.tensors = {}
        return training, said

    def load_best(self, model: nn.Module, iteration: int) -> bool:
        """Load the weights after `iteration` into `model`, whole on every rank. Return whether they exist."""
        tensors: _Tensors = {}
        folders = [self.folder] + ([self.found.path.parent] if self.found else [])
        for folder in folders if self._ranks.rank == 0 else ():
            try:
                tensors = tensors or read(place_of(folder, iteration)).tensors
            except Damaged:
                continue
        best = self._move(_of_kinds(tensors, OF_MODEL))
        if best:
            load_model(model, best)
        return bool(best)

    def close(self) -> int | None:
        """The iteration of the newest checkpoint, on every rank."""
        return self._ranks.exchange(self.newest)[0]

    def _move(self, tensors: Mapping[str, torch.Tensor], source: int = 0, to: int | None = None) -> _Tensors:
        """A rank's tensors, on the rank `to`, or on all. Every rank calls it. They are where collectives send from."""
        forms = {key: [list(t.shape), str(t.dtype).removeprefix("torch.")] for key, t in tensors.items()}
        rank, found = self._ranks.rank, {}
        device = self._ranks.device if self._ranks.backend == "nccl" else torch.device("cpu")
        for key, (shape, dtype) in self._ranks.exchange(forms)[source].items():
            if to is not None and rank not in (source, to):
                continue
            found[key] = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            if not found[key].numel():
                continue
            if rank == source:
                found[key].copy_(tensors[key])
            sent = found[key].view(-1).view(torch.uint8)
            with self._ranks.ledger.naming(key, STATE):
                if to is None:
                    dist.broadcast(sent, source)
                elif rank == source:
                    dist.send(sent, to)
                else:
                    dist.recv(sent, source)
        return found


def _of_kinds(tensors: Mapping[str, torch.Tensor], kinds: Sequence[str]) -> _Tensors:
    return {key: tensor for key, tensor in tensors.items() if key.partition("/")[0] in kinds}


def _on_the_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
