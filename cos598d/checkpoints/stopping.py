"""Why a training ends before its last step, and how the ranks agree on it."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cos598d.checkpoint_flags import LOSS_METRIC, CheckpointFlags
from cos598d.comm.communicator import Communicator
from cos598d.terminal.signals import ENDING, Requests

_SIGNALS = tuple(number.name for number in ENDING)
_TIME, _SAVE = "max_seconds", "save"
_LOOK_SECONDS = 0.5


class Stopping:
    """Who asks for the end between two steps, or for a checkpoint: agreed over the ranks at no cost.

    1. In every step each rank gives its `votes`, which travel with the loss: the signals that it has got and, of rank 0
       alone, whose clock decides, whether --max_seconds or --save_seconds have passed.
    2. Every rank is given their sums, the same ones, to `count`: then `reason` says why all stop after this step, in
       words (None: nobody asked), and `wants_save` whether it is time for a checkpoint.
    3. Where no loss travels, as while the ranks evaluate, whoever is asked tells the others by a key in the ranks'
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
        self._decides = comm.rank == 0
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
        self.reason = next((self._words(name) for name in found if name != _SAVE), None)

    def saved(self) -> None:
        """A checkpoint has been made: --save_seconds count from here."""
        self._saved, self.wants_save = self._clock(), False

    def _has_passed(self, seconds: float | None, since: float) -> bool:
        return self._decides and seconds is not None and self._clock() - since >= seconds

    def _words(self, name: str) -> str:
        return f"stopped by {name}" if name in _SIGNALS else f"--max_seconds {self._flags.max_seconds:g} have passed"


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
        """Where it stands, as JSON, for `resume`."""
        return {"metric": self.metric, "best": self.best, "best_iteration": self.best_iteration, "waited": self.waited}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Go on from there. By another metric than the one that was watched, the best is looked for anew."""
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
        is_best = value is not None and (self.best is None or self._is_better(value, self.best))
        if is_best:
            self.best, self.best_iteration, self.waited = value, iteration, 0
        else:
            self.waited += 1
        return is_best

    def _is_better(self, value: float, other: float) -> bool:
        return value < other if self.metric == LOSS_METRIC else value > other
