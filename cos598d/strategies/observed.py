"""A timed strategy: an iteration's seconds by phase, its loss, the ranks' votes, and the memory held."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from cos598d.comm.communicator import Call, Communicator
from cos598d.measure.clock import IterationClock
from cos598d.records.conventions import LOSS
from cos598d.strategies.base import MakeOptimizer, Module, Strategy
from cos598d.strategies.memory import Peak, allocated_bytes


class TimedStrategy:
    """Wraps a strategy and times the methods that a step calls. It passes on all other attributes.

    1. `iteration` encloses a step: it starts the clock and the ledger's iteration, and stops the clock.
    2. Forward, backward, finish and clip belong to one phase each; `step` divides itself into phases.
    3. `backward` adds up the losses. Their sum over the ranks is sent while a step's last backward runs, so the global
       batch's loss costs no waiting; `finish` waits for the rest.
    4. This rank's `votes`, such as for an end, are sent with the loss: numbers that are summed over the ranks too.
    5. In iteration number `watched` (0 for none) the bytes that this rank holds are counted: `between_steps` at its
       end, `peak.held` at its peak. That takes time, so do not use an iteration whose seconds count. `passes` is this
       rank's number of micro-batches in it.

    After an iteration, `loss` is the global batch's mean loss, `counted` are the sums of the votes, and `seconds` are
    the clock's. `tokens` is the number of tokens, with padding, in this rank's micro-batches of texts.
    """

    def __init__(
        self,
        strategy: Strategy,
        clock: IterationClock,
        comm: Communicator,
        votes: Callable[[], Sequence[float]] = tuple,
    ):
        self._strategy, self._clock, self._comm, self._votes = strategy, clock, comm, votes
        self.watched, self._is_watching = 0, False
        self.peak = Peak(strategy.memory, functools.partial(allocated_bytes, comm.device))
        self.between_steps: dict[str, int] = {}
        self.passes = 0
        strategy.phase = clock.phase
        self._is_last = True  # whether it is the last of a step's micro-batches
        self.loss = self.seconds = 0.0
        self.counted: list[float] = []
        self.tokens = 0

    @contextlib.contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """The context of iteration `number`, counted from 1."""
        self._clock.start()
        self._comm.ledger.begin(number, self._clock.began)
        self._sums = torch.zeros(1, dtype=torch.float64, device=self._comm.device)  # of this rank, then of all ranks
        self._summing = Call.done()
        self.tokens = 0
        self._is_watching = number == self.watched
        with self.peak.watching() if self._is_watching else contextlib.nullcontext():
            yield
        if self._is_watching:
            self.between_steps, self._is_watching = self._strategy.memory(), False
        self.seconds = self._clock.stop()
        # not sooner: reading it waits for the device, which has work until here
        self.loss, *self.counted = self._sums.tolist()

    def facts(self) -> dict[str, Any]:
        """The fields of an iteration's record other than its seconds."""
        return {
            "iteration": self._comm.ledger.iteration,
            "loss": self.loss,
            **({"tokens_padded": self.tokens} if self.tokens else {}),
            "spans_seconds": self._clock.spans,
        }

    def attach(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Module:
        """As in the strategy."""
        module = self._strategy.attach(model, make_optimizer)

        def forward(**inputs: torch.Tensor) -> tuple:
            self.tokens += inputs["input_ids"].numel() if "input_ids" in inputs else 0
            with self._clock.phase("forward"):
                return module(**inputs)

        return forward

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As in the strategy."""
        self._is_last = False
        with self._strategy.no_sync():
            yield
        self._is_last = True

    def backward(self, loss: torch.Tensor) -> None:
        """As in the strategy."""
        self._sums += loss.detach()
        if self._is_last:
            self._sums = torch.cat([self._sums, self._sums.new_tensor(self._votes())])
            self._summing = self._comm.all_reduce(self._sums, "loss", purpose=LOSS, async_op=True)
        with self._clock.phase("backward"):
            self._strategy.backward(loss)
        self.passes += self._is_watching
        self._look()

    def finish(self) -> None:
        """As in the strategy; also waits for the sum of the losses."""
        with self._clock.phase("sync"):
            self._strategy.finish()
            self._summing.wait()
        self._look()

    def clip(self, max_norm: float) -> torch.Tensor | None:
        """As in the strategy."""
        with self._clock.phase("clip"):
            return self._strategy.clip(max_norm)

    def step(self) -> bool:
        """As in the strategy."""
        is_good = self._strategy.step()
        self._look()
        return is_good

    def _look(self) -> None:
        if self._is_watching:
            self.peak.look()
