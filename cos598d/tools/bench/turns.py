"""One candidate's turn: an iteration of its replica, timed from a common start."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from cos598d.comm.group import Ranks
from cos598d.comm.ledger import Ledger, Totals
from cos598d.config import RunConfig
from cos598d.measure.clock import IterationClock
from cos598d.optimizers import make_optimizer
from cos598d.parallel import Parallel, make_sync, parallelize
from cos598d.phases import Phases
from cos598d.records.conventions import AGREEMENT, WARM_UP
from cos598d.tools.bench.candidates import Candidate
from cos598d.tools.bench.workload import Stepper, Workload

PHASES = ("forward", "backward", "sync")


class Turn:
    """One candidate with its replica of the model, from attaching to detaching.

    The bench's `stepper`, if there is one, clips and steps for every candidate with one AdamW state. A candidate that
    steps by itself has an optimizer of its own, with learning rate 0 as the stepper's, and is an `OwnStepTurn`.
    """

    def __init__(self, candidate: Candidate, workload: Workload, ranks: Ranks, stepper: Stepper | None):
        self._ranks, self._stepper = ranks, stepper
        self.clock = IterationClock(ranks.device)
        self.ledger, self.totals = Ledger(), Totals()
        self._config = RunConfig(learning_rate=0.0)
        self._replica: nn.Module = workload.replica()
        self._model = self._wrapped(candidate)
        self._module = workload.computing(self._model)
        self._phase = self._model.phase = Phases(self.clock)  # type: ignore[method-assign]
        first = workload.inputs(0, ranks.rank, ranks.world_size)
        self.gradient_norm = self._first_norm(first)
        for _ in range(WARM_UP):
            self.iterate(first)

    def iterate(self, inputs: dict[str, torch.Tensor]) -> list[float]:
        """One iteration from a common start: its seconds on this rank, those of its phases, and its start and end on
        the host's clock. `totals` has what it sent.

        Forward, backward with the sync, clipping and AdamW with a stepper, and gradients set to None.
        """
        start_line(self._ranks)
        self.ledger.begin(self.ledger.iteration + 1)
        self.clock.start()
        with self.ledger:
            self._work(inputs)
        seconds = self.clock.stop()
        _, self.totals = self.ledger.take()
        self.ledger.rows.clear()
        return [seconds, *(self.clock.phases[phase] for phase in PHASES), self.clock.started, self.clock.stopped]

    def detach(self) -> None:
        """Undo the attaching."""
        self._model.detach()
        del self._module

    def _wrapped(self, candidate: Candidate) -> Parallel:
        return Parallel(self._replica, make_sync(candidate.name, ledger=self.ledger, **candidate.options))

    def _work(self, inputs: dict[str, torch.Tensor]) -> None:
        self._average(inputs)
        if self._stepper:
            with self._phase("clip"):
                self._stepper.clip(self._replica)
            with self._phase("step"):
                self._stepper.step(self._replica)
        with self._phase("sync"):
            self._model.sync.after_step()
        self._replica.zero_grad(set_to_none=True)

    def _average(self, inputs: dict[str, torch.Tensor]) -> None:
        with self._phase("forward"):
            loss = self._module(**inputs)[0]
        with self._phase("backward"):
            loss.backward()

    def _first_norm(self, inputs: dict[str, torch.Tensor]) -> float | None:
        """The norm of the averaged gradient, which exposes a candidate that does not average; None if it is not finite
        (JSON has no such numbers)."""
        self.clock.start()
        self._average(inputs)
        gradients = [p.grad for p in self._replica.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).item()
        self.clock.stop()  # otherwise its phases would count for the next iteration
        self._model.sync.after_step()
        self._replica.zero_grad(set_to_none=True)
        return norm if math.isfinite(norm) else None


class OwnStepTurn(Turn):
    """One candidate that steps by itself: it shards, or it is another library's engine.

    Its iteration begins with the optimizer's step by the gradients of the one before, and ends with clipping. So
    communication that a step starts, such as gathering weights during the next forward, counts once, as in training.
    """

    def _wrapped(self, candidate: Candidate) -> Parallel:
        make: Callable = lambda _: make_optimizer(self._replica, self._config)  # noqa: E731
        model, _ = parallelize(self._replica, make, candidate.name, ledger=self.ledger, **candidate.options)
        return model

    def _work(self, inputs: dict[str, torch.Tensor]) -> None:
        assert self._model.optimizer is not None
        with self._phase("step"):
            self._model.optimizer.step()
            self._model.optimizer.zero_grad()
        self._average(inputs)
        with self._phase("clip"):
            self._model.clip_grad_norm_(self._config.max_grad_norm)

    def _first_norm(self, inputs: dict[str, torch.Tensor]) -> float | None:
        self.clock.start()
        self._average(inputs)
        norm = float(self._model.clip_grad_norm_(self._config.max_grad_norm))
        self.clock.stop()
        return norm if math.isfinite(norm) else None


def make_turn(candidate: Candidate, workload: Workload, ranks: Ranks, stepper: Stepper | None) -> Turn:
    """The candidate, attached to a replica of its own and warmed up."""
    return (OwnStepTurn if candidate.steps_itself else Turn)(candidate, workload, ranks, stepper)


def start_line(ranks: Ranks) -> None:
    """A barrier: start all ranks together, as precisely as an all-reduce of 4 bytes can."""
    with ranks.ledger.naming("start line", AGREEMENT):
        dist.all_reduce(torch.zeros(1, device=ranks.device))
    if ranks.device.type == "cuda":  # otherwise a rank's host would go on before its device has met the others
        torch.cuda.synchronize(ranks.device)
