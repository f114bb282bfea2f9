"""What may happen between two steps of a training: it is saved, or it ends before its last step."""

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
    """The best evaluation so far, and how many have come since then that were no better.

    A loss is better when it is smaller, any other metric when it is larger; an evaluation without a finite one is worse
    than all that have one. Every rank sees the same metrics, so all of them come to the same end.
    """

    def __init__(self, metric: str = LOSS_METRIC, patience: int | None = None):
        """`patience`: after how many evaluations that were no better `is_over`; None: never."""
        self.metric, self.patience = metric, patience
        self.best: float | None = None
        self.best_iteration = 0
        self.waited = 0

    def position(self) -> dict[str, Any]:
        """What `resume` needs, as JSON."""
        return {"metric": self.metric, "best": self.best, "best_iteration": self.best_iteration, "waited": self.waited}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Go on from there. By another metric than the one that was watched, the best is looked for from the start."""
        if position["metric"] == self.metric:
            self.best, self.best_iteration = position["best"], position["best_iteration"]
            self.waited = position["waited"]

    @property
    def is_over(self) -> bool:
        """Whether the patience is at its end."""
        return self.patience is not None and self.waited >= self.patience

    def sentence(self) -> str:
        """Why training stops, when it `is_over`."""
        best = "" if self.best is None else f" {self.best:.4f} after iteration {self.best_iteration}"
        return f"stopped early: {self.waited} evaluations in a row had no better {self.metric} than the best{best}"

    def see(self, metrics: Mapping[str, Any], iteration: int) -> bool:
        """The metrics after an iteration; whether they are the best so far."""
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
    """Who asks for the end between two steps, or for a checkpoint: agreed over the ranks at no cost.

    1. In every step each rank gives its `votes`, which travel with the loss: the signals that it has got. Rank 0, whose
       clock decides, also votes on whether --max_seconds or --save_seconds have passed.
    2. Every rank is given their sums, the same ones, to `count`: then `reason` is why all stop after this step, in
       words (None: nobody asked), and `wants_save` whether it is time for a checkpoint.
    3. Where no loss is sent, as while the ranks evaluate, whoever is asked tells the others by a key in the ranks'
       store, for which `is_asked` looks twice a second.

    `began` is the moment of `clock` from which --max_seconds counts: a clock that nobody sets.
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
        """Whether this rank would vote for the end now, or has heard that another one would."""
        if self._requests.first is not None or self._has_passed(self._flags.max_seconds, self._began):
            self._comm.store.set(self._key, "")
            return True
        if self._clock() - self._looked < _LOOK_SECONDS:
            return False
        self._looked = self._clock()
        return self._comm.store.check([self._key])

    def votes(self) -> list[float]:
        """This rank's, one for each of VOTES."""
        first = self._requests.first
        wishes = {name: first is not None and name == first.name for name in _SIGNALS}
        wishes[_TIME] = self._has_passed(self._flags.max_seconds, self._began)
        wishes[_SAVE] = self._has_passed(self._flags.save_seconds, self._saved)
        return [float(wishes[name]) for name in self.VOTES]

    def count(self, sums: Sequence[float]) -> None:
        """The votes are in: all ranks' of one step, summed up."""
        found = [name for name, votes in zip(self.VOTES, sums, strict=True) if votes]
        self.wants_save = _SAVE in found
        passed = f"--max_seconds {self._flags.max_seconds or 0:g} have passed"
        self.reason = next((passed if name == _TIME else f"stopped by {name}" for name in found if name != _SAVE), None)

    def saved(self) -> None:
        """A checkpoint has been made: --save_seconds count from here."""
        self._saved, self.wants_save = self._clock(), False

    def _has_passed(self, seconds: float | None, since: float) -> bool:
        return self._comm.rank == 0 and seconds is not None and self._clock() - since >= seconds


class TrainingControl:
    """Decides between two steps, the same on every rank, whether a training is saved and whether it goes on.

    1. `begin` restores the training from the checkpoint that it resumes from, if there is one.
    2. After a step `count` is given the ranks' `votes`, after an evaluation `see` the metrics.
    3. Then `is_over` and `saves` are the decisions; `save` has a checkpoint written while the next steps run.

    `stopped` says why the training is stopped before its work is done; None if it is not, or comes to its end early.
    A checkpoint has, besides the strategy's state, the `Position`, the early stopper, the `facts` that make it this
    run, and of each rank its random states and its position in the record.
    """

    stopped: str | None = None

    def __init__(
        self,
        setup: TrainingSetup,
        stopping: Stopping | None = None,
        checkpoints: Checkpoints | None = None,
        facts: Mapping[str, Any] | None = None,
    ):
        """Without `stopping` nobody asks for the end; without `checkpoints` nothing is saved."""
        self.early = EarlyStopping(setup.config.metric(), setup.config.patience())
        self._setup, self._stopping, self._checkpoints, self._facts = setup, stopping, checkpoints, dict(facts or {})
        self._is_best = False  # what was evaluated last, of all evaluations so far

    def begin(self, plan: Plan) -> Position:
        """Where the training begins: the strategy, attached, and `early` are then as they were there."""
        self._plan, at = plan, Position()
        if self._checkpoints is not None:
            if self._checkpoints.resumed is not None:
                at = self._restore(self._checkpoints)
            if plan.has_checkpoints:
                self._checkpoints.open()  # a folder that cannot be written is told before the first step
        self._saved = replace(at)
        return at

    def votes(self) -> Sequence[float]:
        """What this rank adds to the votes that are sent with a step's loss."""
        return self._stopping.votes() if self._stopping else ()

    def count(self, votes: Sequence[float]) -> None:
        """The votes of all ranks are in, summed up: after a step, or when an evaluation was broken off."""
        if self._stopping:
            self._stopping.count(votes)
            self.stopped = self._stopping.reason
        if self._checkpoints:
            self._checkpoints.poll()

    def see(self, metrics: Mapping[str, Any], at: Position) -> None:
        """The model was evaluated."""
        self._is_best = self.early.see(metrics, at.iteration)

    @property
    def is_over(self) -> bool:
        """Whether no further step is to follow, however many there were to be."""
        return self.stopped is not None or self.early.is_over

    def saves(self, at: Position) -> bool:
        """Whether the training is to be saved as it is now."""
        if self._checkpoints is None or at == self._saved:
            return False
        is_time = self._stopping is not None and self._stopping.wants_save
        is_best = self._is_best and self._plan.has_checkpoints
        return self.stopped is not None or is_time or is_best or self._plan.saves(at)

    def save(self, at: Position) -> None:
        """Save it: a copy is taken, and written while the next steps run."""
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
        """Go on from the checkpoint that was found, and say what is other than it was."""
        config, comm, strategy, found = self._setup.config, self._setup.comm, self._setup.strategy, checkpoints.resumed
        assert found is not None  # `begin` has checked it
        own, lost = found.restore(strategy, comm, checkpoints.sync)
        # What this start has made travel, the training that was never interrupted has not.
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
                said.append("dropout's masks are other ones")
        if lost:
            said.append(f"{printable(lost, 300)} is not carried over")
        if strategy.never_kept:
            said.append(f"{strategy.never_kept} begins afresh")
        self._setup.console.say("; ".join(said))
        return Position(**found.training["position"])
