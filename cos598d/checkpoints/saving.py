"""Saving a training, and continuing it: its tensors between the ranks and rank 0, which has the files."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from cos598d.checkpoints.folder import (
    FORMAT,
    WEIGHTS,
    Damaged,
    Found,
    Training,
    read,
    step_name,
    tidy,
    write,
)
from cos598d.checkpoints.stopping import Best
from cos598d.comm.group import Ranks
from cos598d.errors import UserError, first_line
from cos598d.parallel import Parallel
from cos598d.plan import Position
from cos598d.records.conventions import STATE
from cos598d.state import OF_MODEL, load_model, model_state
from cos598d.terminal.words import number_of

_OF_SYNC, _CPU, _CUDA = "sync/", "random/cpu", "random/cuda"
_Tensors = dict[str, torch.Tensor]


class Checkpoints:
    """The checkpoints of a run. Every rank creates one and makes the same calls, between two steps.

    1. `open` creates the folder before the first step, so that one that cannot be written ends the run at once.
    2. `restore` continues from the checkpoint that the run resumes from: rank 0 reads it and sends it to all.
    3. `save` gathers the whole state on rank 0, which writes it. Training waits meanwhile. If the disk refuses, only
       that checkpoint is lost, and rank 0 warns.
    4. `load_best` loads the weights of the best evaluation.

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
        self._run = found.training.run if found else secrets.token_hex(8)  # rank 0's counts
        #: The iteration of the newest checkpoint, on rank 0; None before the first.
        self.newest: int | None = found.training.iteration if found else None

    def open(self) -> None:
        """Create the folder on rank 0. Raises UserError, the same on every rank, if it cannot be written."""
        reason = None
        if self._ranks.rank == 0:
            try:
                tidy(self.folder)
            except OSError as error:
                reason = error.strerror
        if reason := self._ranks.exchange(reason)[0]:
            raise UserError(f"no checkpoint can be kept in {self.folder} ({reason}). Choose another --output_dir.")

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
        ranks, tensors = self._ranks, {}
        for key, tensor in parallel.state():
            if ranks.rank == 0:
                tensors[key] = _on_the_host(tensor)
        kept = {f"{_OF_SYNC}{name}": _on_the_host(tensor) for name, tensor in parallel.sync.own_state().items()}
        kept |= _random_states(ranks.device)
        own = [kept] + [self._move(kept, rank, to=0) for rank in range(1, ranks.world_size)]
        gathered()
        if ranks.rank:
            return
        of_scale = scaler.state_dict()
        training = Training(
            FORMAT,
            self._run,
            position.iteration,
            ranks.world_size,
            self._sync,
            position,
            best,
            dict(facts),
            of_scale.get("scale"),
            of_scale.get("_growth_tracker", 0),
        )
        try:
            write(self.folder, training, tensors, own, self._describe, self._keep)
            self.newest = position.iteration
        except OSError as error:
            stands = "there is none yet" if self.newest is None else f"that of iteration {self.newest} is complete"
            self._warn(
                f"the checkpoint of iteration {position.iteration} cannot be written to {self.folder} "
                f"({error.strerror or first_line(error)}). Training continues, and {stands}. Make room there."
            )

    def restore(
        self, parallel: Parallel, scaler: ShardedGradScaler, kinds: Sequence[str], seed: int
    ) -> tuple[Training, list[str]]:
        """Continue from the checkpoint, on every rank, before the first step. Return what it says, and remarks.

        kinds: the names of what the optimizer remembers; other tensors were another optimizer's. Raises UserError, the
        same on every rank, if it is another model's checkpoint, or if a rank's own file is forged.
        """
        found, ranks = self.found, self._ranks
        assert found is not None
        training, said = found.training, [f"resumes after iteration {found.training.iteration}, from {found.path}"]
        own: dict[str, torch.Tensor] = {}
        with ranks.ledger.unheard():  # an uninterrupted training would not have sent this
            state = self._move(_of_kinds(found.tensors, (*OF_MODEL, *kinds)))
            if wrong := _misfit(parallel.module, state, kinds):
                raise UserError(
                    f"{found.path} does not fit this model: {wrong} is missing, has another shape, or is unknown. "
                    "Resume with the model that it is from."
                )
            parallel.load_state(state)
            for rank in range(training.ranks) if ranks.world_size == training.ranks else ():
                kept = found.own(rank) if ranks.rank == 0 else {}
                its = self._move(kept, to=rank) if rank else kept
                own = its if rank == ranks.rank else own
        if not own:
            said.append(f"with {number_of(ranks.world_size, 'rank')} in place of {training.ranks}")
        if not (parallel.sync.keeps_optimizer_state and _of_kinds(state, kinds)):
            said.append("what the optimizer remembers starts from scratch")
        if scaler.is_enabled() and training.scale is not None:
            scale = {"scale": training.scale, "_growth_tracker": training.good_steps}
            scaler.load_state_dict(scaler.state_dict() | scale)
        reason = None
        try:
            if own and self._sync == training.sync:
                kept = {key.removeprefix(_OF_SYNC): t for key, t in own.items() if key.startswith(_OF_SYNC)}
                parallel.sync.load_own_state(kept)
            _continue_random(own, ranks, seed, training.iteration)
        except (RuntimeError, TypeError, KeyError, ValueError, UserError) as error:
            reason = first_line(error)
        for rank, why in enumerate(ranks.exchange(reason)):
            if why is not None:
                raise UserError(
                    f"rank {rank}'s file in {found.path} cannot be used ({why}). Resume from another checkpoint."
                )
        found.tensors = {}
        return training, said

    def load_best(self, model: nn.Module, iteration: int) -> bool:
        """Load the weights after `iteration` into `model`, whole on every rank. Return whether they exist."""
        tensors: dict[str, torch.Tensor] = {}
        if self._ranks.rank == 0:
            folders = [self.folder] + ([self.found.path.parent] if self.found else [])
            for place in (folder / step_name(iteration) for folder in folders):
                try:
                    candidate = read(place)
                except Damaged:
                    continue
                if candidate.training.run == self._run:
                    tensors = candidate.tensors
                    break
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
        for key, (shape, dtype) in self._ranks.exchange(forms)[source].items():
            if to is not None and rank not in (source, to):
                continue
            found[key] = torch.empty(shape, dtype=getattr(torch, dtype), device=self._far)
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

    @property
    def _far(self) -> torch.device:
        """Where the backend sends from."""
        return self._ranks.device if self._ranks.backend == "nccl" else torch.device("cpu")


def _of_kinds(tensors: Mapping[str, torch.Tensor], kinds: Sequence[str]) -> _Tensors:
    return {key: tensor for key, tensor in tensors.items() if key.partition("/")[0] in kinds}


def _on_the_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _misfit(model: nn.Module, state: Mapping[str, torch.Tensor], kinds: Sequence[str]) -> str | None:
    """The first tensor that is missing, that the model lacks, or whose shape is another one's and no number's."""
    shapes: dict[str, torch.Size | None] = {key: tensor.shape for key, tensor in model_state(model)}
    for name in {key.partition("/")[2]: None for key in _of_kinds(state, kinds)}:
        shapes |= {f"{kind}/{name}": shapes.get(f"{WEIGHTS}/{name}") for kind in kinds}
    for key in (*shapes, *state):
        shape = shapes.get(key)
        if shape is None or key not in state or state[key].shape not in (shape, ()):
            return key
    return None


def _random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of the generators that a training on `device` uses: dropout continues from them."""
    states = {_CPU: torch.get_rng_state()}
    return states | ({_CUDA: torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _continue_random(own: Mapping[str, torch.Tensor], ranks: Ranks, seed: int, iteration: int) -> None:
    """Continue this rank's random numbers; without its states, begin new ones that no other rank has."""
    if not own:
        fresh = np.random.SeedSequence((seed, ranks.rank, iteration)).generate_state(1, np.uint64)
        torch.manual_seed(int(fresh[0] >> 1))
        return
    torch.set_rng_state(own[_CPU].cpu())
    if ranks.device.type == "cuda" and _CUDA in own:
        torch.cuda.set_rng_state(own[_CUDA].cpu(), ranks.device)
