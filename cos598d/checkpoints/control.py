"""Decisions between two steps of a training: whether it is saved, and whether it ends before its last step."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from cos598d.checkpoint_flags import LOSS_METRIC, CheckpointFlags
from cos598d.checkpoints.layout import step_name
from cos598d.checkpoints.save import Checkpoints
from cos598d.checkpoints.snapshot import RECORD, RankState, load_random_states, random_states
from cos598d.comm.communicator import Communicator
from cos598d.plan import Plan, Position, TrainingSetup
from cos598d.terminal.printable import printable
from cos598d.terminal.signals import ENDING, Requests
from cos598d.terminal.words import number_of

_SIGNALS = tuple(number.name for number in ENDING)
_TIME, _SAVE = "max_seconds", "save"
_LOOK_SECONDS = 0.5


class EarlyStopping:
    """The best evaluation so far, and how many evaluations since then were no better.

    A smaller loss is better; of any other metric, a larger value. An evaluation without a finite value is worse than
    all that have one. Every rank sees the same metrics, so all make the same decision.
    """

    def __init__(self, metric: str = LOSS_METRIC, patience: int | None = None):
        """`patience`: the number of evaluations in a row, none of them better, after which `is_over`; None: never."""
        self.metric, self.patience = metric, patience
        self.best: float | None = None
        self.best_iteration = 0
        self.waited = 0

    def position(self) -> dict[str, Any]:
        """The state that `resume` needs, as JSON."""
        return {"metric": self.metric, "best": self.best, "best_iteration": self.best_iteration, "waited": self.waited}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Continue from there. If the metric has changed, the best is looked for from the start."""
        if position["metric"] == self.metric:
            self.best, self.best_iteration = position["best"], position["best_iteration"]
            self.waited = position["waited"]

    @property
    def is_over(self) -> bool:
        """Whether the patience is used up."""
        return self.patience is not None and self.waited >= self.patience

    def sentence(self) -> str:
        """Why training stops, if it `is_over`."""
        best = "" if self.best is None else f" {self.best:.4f} after iteration {self.best_iteration}"
        return f"stopped early: {self.waited} evaluations in a row had no better {self.metric} than the best{best}"

    def see(self, metrics: Mapping[str, Any], iteration: int) -> bool:
        """Take the metrics after an iteration. Return whether they are the best so far."""
        value = metrics.get(self.metric)
        is_best = value is not None and (
            self.best is None or (value < self.best if self.metric == LOSS_METRIC else value > self.best)
        )
        if is_best:
            self.best, self.best_iteration, self.waited = value, iteration, 0
        else:
            self.waited += 1
        return is_best


class Stopping:
    """Requests to end between two steps, or to save a checkpoint. The ranks agree on them at no cost.

    1. In every step each rank gives its `votes`, which are sent with the loss: the signals that it has received. Rank
       0, whose clock decides, also votes on whether --max_seconds or --save_seconds have passed.
    2. Every rank passes their sums, which are equal, to `count`. Then `reason` is why all stop after this step, as a
       phrase (None: no request), and `wants_save` is whether a checkpoint is due.
    3. While the ranks evaluate, no loss is sent. A rank that is asked to end then sets a key in the ranks' store, which
       `is_asked` checks twice a second.

    --max_seconds counts from `began`, a time of `clock`, which must be monotonic.
    """

    VOTES = (*_SIGNALS, _TIME, _SAVE)

    def __init__(
        self,
        flags: CheckpointFlags,
        comm: Communicator,
        requests: Requests,
        began: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._flags, self._comm, self._requests, self._clock = flags, comm, requests, clock
        self._began, self._saved, self._looked = began, clock(), clock()
        self._key = f"asked to end/{comm.exchange(secrets.token_hex(8))[0]}"
        self.reason: str | None = None
        self.wants_save = False

    def is_asked(self) -> bool:
        """Whether this rank would vote for the end now, or another one has reported that it would."""
        if self._requests.first is not None or self._has_passed(self._flags.max_seconds, self._began):
            self._comm.store.set(self._key, "")
            return True
        if self._clock() - self._looked < _LOOK_SECONDS:
            return False
        self._looked = self._clock()
        return self._comm.store.check([self._key])

    def votes(self) -> list[float]:
        """This rank's votes, one for each of VOTES."""
        first = self._requests.first
        wishes = {name: first is not None and name == first.name for name in _SIGNALS}
        wishes[_TIME] = self._has_passed(self._flags.max_seconds, self._began)
        wishes[_SAVE] = self._has_passed(self._flags.save_seconds, self._saved)
        return [float(wishes[name]) for name in self.VOTES]

    def count(self, sums: Sequence[float]) -> None:
        """Take the sums of all ranks' votes of one step."""
        found = [name for name, votes in zip(self.VOTES, sums, strict=True) if votes]
        self.wants_save = _SAVE in found
        passed = f"--max_seconds {self._flags.max_seconds or 0:g} have passed"
        self.reason = next((passed if name == _TIME else f"stopped by {name}" for name in found if name != _SAVE), None)

    def saved(self) -> None:
        """Called after a checkpoint: --save_seconds count from here."""
        self._saved, self.wants_save = self._clock(), False

    def _has_passed(self, seconds: float | None, since: float) -> bool:
        return self._comm.rank == 0 and seconds is not None and self._clock() - since >= seconds


class TrainingControl:
    """Decides between two steps, the same on every rank, whether a training is saved and whether it continues.

    1. `begin` restores the training from the checkpoint that it resumes from, if there is one.
    2. After a step `count` gets the ranks' `votes`; after an evaluation `see` gets the metrics.
    3. Then `is_over` and `saves` are the decisions. `save` starts to write a checkpoint, during the next steps.

    `stopped`: why the training is stopped before its work is done; None if it is not, or if it ends early by its own
    rule. A checkpoint has the strategy's state, the `Position`, the early stopper, the `facts` that identify the run,
    and each rank's random states and position in the record.
    """

    stopped: str | None = None

    def __init__(
        self,
        setup: TrainingSetup,
        stopping: Stopping | None = None,
        checkpoints: Checkpoints | None = None,
        facts: Mapping[str, Any] | None = None,
    ):
        """Without `stopping` there are no requests to end; without `checkpoints` nothing is saved."""
        self.early = EarlyStopping(setup.config.metric(), setup.config.patience())
        self._setup, self._stopping, self._checkpoints, self._facts = setup, stopping, checkpoints, dict(facts or {})
        self._is_best = False  # whether the latest evaluation is the best so far

    def begin(self, plan: Plan) -> Position:
        """Restore the strategy, attached, and `early` from the checkpoint, if any. Return where the training begins."""
        self._plan, at = plan, Position()
        if self._checkpoints is not None:
            if self._checkpoints.resumed is not None:
                at = self._restore(self._checkpoints)
            if plan.has_checkpoints:
                self._checkpoints.open()  # a folder that cannot be written raises before the first step
        self._saved = replace(at)
        return at

    def votes(self) -> Sequence[float]:
        """This rank's votes, which are sent with a step's loss."""
        return self._stopping.votes() if self._stopping else ()

    def count(self, votes: Sequence[float]) -> None:
        """Take the sums of all ranks' votes: after a step, or when an evaluation was interrupted."""
        if self._stopping:
            self._stopping.count(votes)
            self.stopped = self._stopping.reason
        if self._checkpoints:
            self._checkpoints.poll()

    def see(self, metrics: Mapping[str, Any], at: Position) -> None:
        """Take the metrics of an evaluation."""
        self._is_best = self.early.see(metrics, at.iteration)

    @property
    def is_over(self) -> bool:
        """Whether no further step follows, even if the plan has more."""
        return self.stopped is not None or self.early.is_over

    def saves(self, at: Position) -> bool:
        """Whether the training is to be saved now."""
        if self._checkpoints is None or at == self._saved:
            return False
        is_time = self._stopping is not None and self._stopping.wants_save
        is_best = self._is_best and self._plan.has_checkpoints
        return self.stopped is not None or is_time or is_best or self._plan.saves(at)

    def save(self, at: Position) -> None:
        """Save the training: copy its state, which is written while the next steps run."""
        assert self._checkpoints is not None  # `saves` has checked it
        training = {"position": asdict(at), "early_stopping": self.early.position(), "facts": self._facts}
        is_best = self._is_best and at.evaluated == at.iteration
        self._checkpoints.save(self._setup.strategy, at.iteration, training, self._rank_state, is_best)
        self._setup.record.checkpoint(self._checkpoints.folder / step_name(at.iteration))
        if self._stopping:
            self._stopping.saved()
        self._is_best, self._saved = False, replace(at)

    def _rank_state(self) -> RankState:
        record = self._setup.record
        return RankState({RECORD: record.position()}, random_states(self._setup.comm.device), record.to_disk)

    def _restore(self, checkpoints: Checkpoints) -> Position:
        """Continue from the checkpoint that was found, and print what differs from the saved run."""
        config, comm, strategy, found = self._setup.config, self._setup.comm, self._setup.strategy, checkpoints.resumed
        assert found is not None  # `begin` has checked it
        own, lost = found.restore(strategy, comm, checkpoints.sync)
        # An uninterrupted training would not have sent the bytes of this restore.
        comm.ledger.forget()
        self.early.resume(found.training["early_stopping"])
        said = [f"resumes after iteration {found.iteration}, from {found.path}"]
        if own and comm.world_size == found.world_size:
            load_random_states(own.tensors, comm.device)
        else:
            seeds = np.random.SeedSequence((config.seed, comm.rank, found.iteration))
            torch.manual_seed(int(seeds.generate_state(1, np.uint64)[0] >> 1))
            said.append(f"with {number_of(comm.world_size, 'rank')} in place of {found.world_size}")
            if config.dropout != 0:
                said.append("dropout masks differ")
        if lost:
            said.append(f"{printable(lost, 300)} is lost")
        if strategy.never_kept:
            said.append(f"{strategy.never_kept} starts from scratch")
        self._setup.console.say("; ".join(said))
        return Position(**found.training["position"])
