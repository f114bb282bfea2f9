"""One candidate's turn: an iteration of its replica, timed from a common start."""

import functools
import math
from typing import Any

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import Ledger
from cos598d.config import RunConfig
from cos598d.measure.clock import IterationClock
from cos598d.records.conventions import AGREEMENT, WARM_UP
from cos598d.strategies import STRATEGIES, get_strategy
from cos598d.strategies.formula import MemoryEstimate, TrainingSpec, without_values
from cos598d.strategies.memory import Peak, count_memory, tensors_in
from cos598d.strategies.optimizers import counter_bytes, make_optimizer, states_per_weight
from cos598d.strategies.replicated import Replicated
from cos598d.sync import get_sync
from cos598d.tools.bench.candidates import Candidate
from cos598d.tools.bench.workload import Stepper, Workload, values_of

PHASES = ("forward", "backward", "sync")


class Turn:
    """One candidate with its replica of the model, from attaching to detaching."""

    def __init__(self, candidate: Candidate, workload: Workload, comm: Communicator, stepper: Stepper | None):
        self._comm, self._stepper = comm, stepper
        self.clock = IterationClock(comm.device)
        self._job = job_of(workload, comm, with_state=stepper is not None)
        self._is_sparse = candidate.has_sparse_embeddings
        self._model: nn.Module = workload.replica(candidate.has_sparse_embeddings)
        self._sync = get_sync(candidate.name)(comm, False, candidate.options)
        self._module = workload.computing(self._sync.attach(self._model))
        first = workload.inputs(0, comm.rank, comm.world_size)
        for _ in range(WARM_UP):
            self.iterate(first)
        self.gradient_norm = self._norm(first)

    def iterate(self, inputs: dict[str, torch.Tensor]) -> list[float]:
        """One iteration from a common start: its seconds on this rank, those of its phases, and its start and end on
        the host's clock.

        Forward, backward, the sync's finish (with a stepper also clipping and AdamW), and gradients set to None.
        """
        start_line(self._comm)
        self._comm.ledger = Ledger()
        clock = self.clock
        clock.start()
        self._average(inputs)
        if self._stepper:
            with clock.phase("clip"):
                self._stepper.clip(self._model)
            with clock.phase("step"):
                self._stepper.step(self._model)
        with clock.phase("sync"):
            self._sync.after_step()
        self._model.zero_grad(set_to_none=True)
        seconds = clock.stop()
        return [seconds, *(clock.phases[phase] for phase in PHASES), clock.started, clock.stopped]

    def detach(self) -> None:
        """Undo the attaching."""
        self._sync.detach()
        del self._module

    def held(self, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        """One more, untimed iteration: the bytes held at its peak and at its end, by category; and a formula's
        prediction for both."""
        peak = Peak(self._memory)
        with peak.watching():
            self._module(**inputs)[0].backward()
        peak.look()
        self._sync.finish()
        peak.look()
        if self._stepper:
            self._stepper.clip(self._model)
            self._stepper.step(self._model)
        self._sync.after_step()
        self._model.zero_grad(set_to_none=True)
        expected = Replicated(self._sync, comm=self._comm).expected_memory(self._job)
        if self._is_sparse:
            expected = MemoryEstimate(unsaid="the rows of a sparse gradient depend on the batch's words")
        return {"between_steps": self._memory(), "peak": peak.held, **expected.as_record()}

    def _memory(self) -> dict[str, int]:
        parameters = list(self._model.parameters())
        held = count_memory(
            parameters=[p.data for p in parameters],
            gradients=[p.grad for p in parameters if p.grad is not None],
            optimizer=self._stepper.state() if self._stepper else (),
            buckets=tensors_in(self._sync),
        )
        return held | {"buckets": held["buckets"] + self._sync.hidden_bytes()}

    def _average(self, inputs: dict[str, torch.Tensor]) -> None:
        with self.clock.phase("forward"):
            loss = self._module(**inputs)[0]
        with self.clock.phase("backward"):
            loss.backward()
        with self.clock.phase("sync"):
            self._sync.finish()

    def _norm(self, inputs: dict[str, torch.Tensor]) -> float | None:
        """The norm of the averaged gradient, which exposes a candidate that does not average; None if it is not finite
        (JSON has no such numbers)."""
        self.clock.start()
        self._average(inputs)
        norm = torch.nn.utils.get_total_norm(values_of(self._model.parameters())).item()
        self.clock.stop()  # otherwise its phases would count for the next iteration
        self._sync.after_step()
        self._model.zero_grad(set_to_none=True)
        return norm if math.isfinite(norm) else None


class StrategyTurn:
    """One candidate that steps by itself, as `Turn` with a stepper: a sharded one, or another library's engine.

    Its iteration begins with the optimizer's step by the previous gradients, and ends with clipping. So communication
    that a step starts, such as gathering weights during the next forward, counts once, as in training. The learning
    rate is 0, as the stepper's.
    """

    def __init__(self, candidate: Candidate, workload: Workload, comm: Communicator):
        self._comm, self._config = comm, RunConfig(learning_rate=0.0)
        self.clock = IterationClock(comm.device)
        make_strategy = get_strategy(candidate.name)
        self._strategy = make_strategy(comm, False, candidate.options, workload.precision)
        self._job = job_of(workload, comm)
        optimizer = functools.partial(make_optimizer, config=self._config)
        self._module = self._strategy.attach(workload.replica(), optimizer)
        first = workload.inputs(0, comm.rank, comm.world_size)
        self.clock.start()
        norm = self._average(first)
        # Of the average over the ranks, which exposes a candidate that does not average.
        self.gradient_norm = norm if math.isfinite(norm) else None
        for _ in range(WARM_UP):
            self.iterate(first)

    def iterate(self, inputs: dict[str, torch.Tensor]) -> list[float]:
        """As `Turn.iterate`."""
        start_line(self._comm)
        self._comm.ledger = Ledger()
        clock = self._strategy_clock()
        clock.start()
        self._strategy.step()
        self._average(inputs)
        seconds = clock.stop()
        return [seconds, *(clock.phases[phase] for phase in PHASES), clock.started, clock.stopped]

    def detach(self) -> None:
        """Undo the attaching."""
        self._strategy.detach()
        del self._module

    def held(self, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        """As `Turn.held`."""
        self._strategy.step()
        between, peak = self._strategy.memory(), Peak(self._strategy.memory)
        with peak.watching():
            self._strategy.backward(self._module(**inputs)[0] / self._comm.world_size)
        peak.look()
        self._strategy.finish()
        peak.look()
        self._strategy.clip(self._config.max_grad_norm)
        return {"between_steps": between, "peak": peak.held, **self._strategy.expected_memory(self._job).as_record()}

    def _strategy_clock(self) -> IterationClock:
        self._strategy.phase = self.clock.phase  # a trace replaces the clock
        return self.clock

    def _average(self, inputs: dict[str, torch.Tensor]) -> float:
        """Forward, backward, finish and clip. Return the norm before clipping."""
        with self.clock.phase("forward"):
            loss = self._module(**inputs)[0]
        with self.clock.phase("backward"):
            self._strategy.backward(loss / self._comm.world_size)
        with self.clock.phase("sync"):
            self._strategy.finish()
        with self.clock.phase("clip"):
            norm = self._strategy.clip(self._config.max_grad_norm)
        return math.nan if norm is None else float(norm)


def job_of(workload: Workload, comm: Communicator, with_state: bool = True) -> TrainingSpec:
    """The workload's settings for memory formulas: one micro-batch per step, and the optimizer's state if any."""
    config = RunConfig()
    states = (states_per_weight(config), counter_bytes(config)) if with_state else (0, 0)
    return TrainingSpec(without_values(workload.model), comm.world_size, comm.rank, *states)


def make_turn(
    candidate: Candidate, workload: Workload, comm: Communicator, stepper: Stepper | None
) -> Turn | StrategyTurn:
    """The candidate, attached to a replica of its own and warmed up."""
    if candidate.name in STRATEGIES:
        return StrategyTurn(candidate, workload, comm)
    return Turn(candidate, workload, comm, stepper)


def start_line(comm: Communicator) -> None:
    """A barrier: start all ranks together, as precisely as an all-reduce of 4 bytes can."""
    comm.all_reduce(torch.zeros(1, device=comm.device), "start line", purpose=AGREEMENT)
    comm.time.wait(comm.time.now())  # otherwise a CUDA rank's host would continue before its device has met the others
