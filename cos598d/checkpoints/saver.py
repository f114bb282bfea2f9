"""The checkpoints of a run, as its loop sees them: what goes into one, and how a training goes on from one."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from cos598d.checkpoints import FOLDER, Checkpoint, Checkpoints, RankState, load_random_states, random_states
from cos598d.checkpoints.stopping import EarlyStopping
from cos598d.plan import Position, TrainingSetup
from cos598d.strategies.base import Strategy
from cos598d.terminal.printable import printable
from cos598d.terminal.words import number_of

RECORD = "record"  # the fact of every rank that says where its part of the record is


class Saving:
    """Saves a training in `checkpoints/` of the run's folder, and restores it from one. Every rank calls it alike.

    The folder is made when it is first needed. In a checkpoint stand, beside the strategy's state, where the training
    is (`Position`), the early stopper, the flags that make it this run, and of each rank its random states and where
    its part of the record is.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        describe: Callable[[Path], None],
        facts: Mapping[str, Any],
        found: Checkpoint | None = None,
    ):
        """`describe` writes a model's configuration and vocabulary into a folder, `facts` are what must not change from
        one start of a run to the next, and `found` is the checkpoint to go on from."""
        self.folder = setup.record.folder / FOLDER
        self._config, self._comm, self._console, self._record = setup.config, setup.comm, setup.console, setup.record
        self._describe, self._facts, self._found = describe, dict(facts), found
        self._sync = {"sync": setup.config.sync} | asdict(setup.config.sync_options())
        self._checkpoints: Checkpoints | None = None

    def restore(self, strategy: Strategy, early: EarlyStopping) -> Position:
        """Where the training begins: `strategy`, attached, and `early` are as they were there."""
        found = self._found
        if found is None:
            return Position()
        restored = found.restore(strategy, self._comm, self._sync)
        # What this start has made travel, the training that was never interrupted has not.
        self._comm.ledger.forget()
        early.resume(found.training["early_stopping"])
        said = [f"goes on after iteration {found.iteration}, from {found.path}"]
        if restored.own and self._comm.world_size == found.world_size:
            load_random_states(restored.own.tensors, self._comm.device)
        else:
            torch.manual_seed(_mixed_seed(self._config.seed, self._comm.rank, found.iteration))
            said.append(f"with {number_of(self._comm.world_size, 'rank')} in place of {found.world_size}")
            if self._config.dropout != 0:
                said.append("dropout's masks are other ones")
        if restored.lost:
            said.append(f"{printable(restored.lost, 300)} is not carried over")
        if strategy.never_kept:
            said.append(f"{strategy.never_kept} begins afresh")
        self._console.say("; ".join(said))
        return Position(**found.training["position"])

    def save(self, strategy: Strategy, at: Position, early: EarlyStopping, is_best: bool) -> None:
        """Copy the training as it is between two steps; it is written while the next ones run."""
        training = {"position": asdict(at), "early_stopping": early.position(), "facts": self._facts}
        self.open().save(strategy, at.iteration, training, self._own, is_best)

    def _own(self) -> RankState:
        return RankState({RECORD: self._record.position()}, random_states(self._comm.device), self._record.to_disk)

    def load_best(self, model: nn.Module, iteration: int) -> bool:
        """Give `model`, whole on every rank, the weights that were best, after `iteration`; whether they are there."""
        found = self.open().best()
        if found is None or found.iteration != iteration:
            return False
        found.load_model(model, self._comm)
        return True

    def open(self) -> Checkpoints:
        """The checkpoints, whose folder is made now if it is not there. Raises UserError where it cannot be."""
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(
                self.folder,
                self._comm,
                self._config.keep,
                self._describe,
                self._sync,
                self._found,
                self._console.warn,
            )
        return self._checkpoints

    def poll(self) -> None:
        """Say what there is to say of checkpoints that could not be written. Costs nothing."""
        if self._checkpoints is not None:
            for sentence in self._checkpoints.poll():
                self._console.warn(sentence)

    def close(self) -> int | None:
        """Wait until what is being written is on the disk; the iteration of the newest whole checkpoint, if any."""
        if self._checkpoints is None:  # nothing was saved by this start
            return self._found.iteration if self._found else None
        for sentence in self._checkpoints.close():
            self._console.warn(sentence)
        return self._comm.exchange(self._checkpoints.newest)[0]

    def __enter__(self) -> "Saving":
        return self

    def __exit__(self, *error: Any) -> None:
        if self._checkpoints is not None:
            self._checkpoints.__exit__(*error)


def _mixed_seed(*words: int) -> int:
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)
