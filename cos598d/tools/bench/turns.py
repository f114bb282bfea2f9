"""One candidate's turn: an iteration of its replica, timed from a common start."""

import math

import torch
import torch.distributed as dist
from torch import nn

from cos598d.comm.group import Ranks
from cos598d.comm.ledger import Ledger
from cos598d.config import RunConfig
from cos598d.measure.clock import IterationClock
from cos598d.optimizers import make_optimizer
from cos598d.parallel import Parallel, make_sync, parallelize
from cos598d.records.conventions import AGREEMENT, SYNCHRONIZING, WARM_UP
from cos598d.records.figures import TOTALS
from cos598d.tools.bench.candidates import Candidate
from cos598d.tools.bench.workload import Workload

PHASES = ("forward", "backward", "sync")
# The work of a step is the same, but the weights do not change: so no candidate's average, and not the floor's lack of
# one, changes what the others compute.
STEPPING = RunConfig(learning_rate=0.0)


class Turn:
    """One candidate with its replica of the model, from attaching to detaching.

    Without `steps` an iteration is forward and backward with the sync, and gradients set to None. With it, an iteration
    begins with AdamW's step by the gradients of the one before, and ends with clipping. So communication that a step
    starts, such as gathering weights during the next forward, counts once, as in training.
    """

    def __init__(self, candidate: Candidate, workload: Workload, ranks: Ranks, steps: bool):
        self._ranks = ranks
        self._clock, self._ledger, self.totals = IterationClock(ranks.device), Ledger(), [0] * len(TOTALS)
        replica = workload.replica(shares=not candidate.steps_itself)
        self._model = self._wrapped(replica, candidate, steps)
        self._module = workload.computing(self._model)
        self._phase = self._model.phase = self._clock.phase  # type: ignore[method-assign]
        first = workload.inputs(0, ranks.rank, ranks.world_size)
        self.gradient_norm = self._first_norm(first)
        for _ in range(WARM_UP):
            self.iterate(first)

    def _wrapped(self, replica: nn.Module, candidate: Candidate, steps: bool) -> Parallel:
        if not steps:
            return Parallel(replica, make_sync(candidate.name, ledger=self._ledger, **candidate.options))

        def make(_: list[nn.Parameter]) -> torch.optim.Optimizer:
            return make_optimizer(replica, STEPPING)

        return parallelize(replica, make, candidate.name, ledger=self._ledger, **candidate.options)[0]

    def iterate(self, inputs: dict[str, torch.Tensor]) -> list[float]:
        """One iteration from a common start: its seconds on this rank, those of its phases, and its start and end on
        the host's clock. `totals` has what it sent."""
        start_line(self._ranks)
        self._ledger.begin(self._ledger.iteration + 1)
        self._clock.start()
        with self._ledger:
            if optimizer := self._model.optimizer:
                with self._phase("step"):
                    optimizer.step()
                    optimizer.zero_grad()
                self._average(inputs)
                with self._phase("clip"):
                    self._model.clip_grad_norm_(STEPPING.max_grad_norm)
            else:
                self._average(inputs)
                self._drop_gradients()
        seconds = self._clock.stop()
        since = self._ledger.take()
        self._ledger.rows.clear()
        self.totals = [
            sum(of) for of in zip(*(since.get(each, [0] * len(TOTALS)) for each in SYNCHRONIZING), strict=True)
        ]
        return [seconds, *(self._clock.phases[phase] for phase in PHASES), self._clock.started, self._clock.stopped]

    def detach(self) -> None:
        """Undo the attaching."""
        self._model.detach()

    def _average(self, inputs: dict[str, torch.Tensor]) -> None:
        with self._phase("forward"):
            loss = self._module(**inputs)[0]
        with self._phase("backward"):
            loss.backward()

    def _drop_gradients(self) -> None:
        with self._phase("sync"):
            self._model.sync.after_step()
        self._model.zero_grad(set_to_none=True)

    def _first_norm(self, inputs: dict[str, torch.Tensor]) -> float | None:
        """The norm of the averaged gradient, which exposes a candidate that does not average; None if it is not finite
        (JSON has no such numbers)."""
        self._clock.start()
        self._average(inputs)
        norm = float(self._model.clip_grad_norm_(STEPPING.max_grad_norm))
        if not self._model.optimizer:
            self._drop_gradients()
        self._clock.stop()  # otherwise its phases would count for the next iteration
        return norm if math.isfinite(norm) else None


def start_line(ranks: Ranks) -> None:
    """A barrier: start all ranks together, as precisely as an all-reduce of 4 bytes can."""
    with ranks.ledger.naming("start line", AGREEMENT):
        dist.all_reduce(torch.zeros(1, device=ranks.device))
    if ranks.device.type == "cuda":  # otherwise a rank's host would go on before its device has met the others
        torch.cuda.synchronize(ranks.device)
