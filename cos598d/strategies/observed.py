"""A strategy's step, timed: an iteration's seconds by phase, its loss, the ranks' votes, and what is held."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cos598d.comm.communicator import Call, Communicator
from cos598d.measure.clock import IterationClock
from cos598d.records.conventions import LOSS
from cos598d.strategies.base import MakeOptimizer, Module, Strategy
from cos598d.strategies.memory import Peak, allocated_bytes


class TimedStrategy:
    """The methods of a strategy that a step calls, timed. Everything else is the strategy's own.

    1. `iteration` encloses a step: it begins the clock and the ledger's iteration, and ends the clock.
    2. Forward, backward, finish and clip belong to a phase each; `step` says by itself what of it belongs to which.
    3. `backward` adds up the losses. Their sum over the ranks is under way while a step's last backward runs, so that
       knowing the global batch's loss costs no waiting; `finish` waits for what is left of it.
    4. What this rank `votes`, such as for an end, is sent with the loss: numbers that are summed over the ranks too.
    5. In iteration number `watched`, 0 for none, the bytes that this rank holds are counted: `between_steps` are those
       at its end, `peak.held` those at the moment within it when they are most. That takes time, so it should be no
       iteration whose seconds are counted. `passes` is how many micro-batches this rank had in it, and `largest` the
       inputs of the largest; of images their shape alone.

    After an iteration `loss` is the global batch's mean loss, `counted` are the sums of the votes, `seconds` are the
    iteration's by the clock, and `tokens` is how many tokens this rank's micro-batches of texts had, with padding.
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
        self.largest: dict[str, torch.Tensor] = {}
        self.between_steps: dict[str, int] = {}
        self.passes = 0
        strategy.phase = clock.phase
        self._is_last = True  # of a step's micro-batches
        self.loss = self.seconds = 0.0
        self.counted: list[float] = []
        self.tokens = 0

    @contextlib.contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """Iteration `number`, counted from 1, is what runs in this context."""
        self._clock.start()
        self._comm.ledger.begin(number, self._clock.began)
        self._sums = torch.zeros(1, dtype=torch.float64, device=self._comm.device)  # this rank's, then all ranks'
        self._summing = Call.done()
        self.tokens = 0
        self._is_watching = number == self.watched
        with self.peak.watching() if self._is_watching else contextlib.nullcontext():
            yield
        if self._is_watching:
            self.between_steps, self._is_watching = self._strategy.memory(), False
        self.seconds = self._clock.stop()
        self.loss, *self.counted = self._sums.tolist()  # not sooner: it waits for the device, which has work until here

    def facts(self) -> dict[str, Any]:
        """What the record of an iteration says of it, besides its seconds."""
        return {
            "iteration": self._comm.ledger.iteration,
            "loss": self.loss,
            **({"tokens_padded": self.tokens} if self.tokens else {}),
            "spans_seconds": self._clock.spans,
        }

    def attach(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Module:
        """As the strategy's."""
        module = self._strategy.attach(model, make_optimizer)

        def forward(**inputs: torch.Tensor) -> tuple:
            self.tokens += inputs["input_ids"].numel() if "input_ids" in inputs else 0
            if self._is_watching and _numbers(inputs) >= _numbers(self.largest):
                self.largest = {name: x.to("meta") if x.is_floating_point() else x for name, x in inputs.items()}
            with self._clock.phase("forward"):
                return module(**inputs)

        return forward

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As the strategy's."""
        self._is_last = False
        with self._strategy.no_sync():
            yield
        self._is_last = True

    def backward(self, loss: torch.Tensor) -> None:
        """As the strategy's."""
        self._sums += loss.detach()
        if self._is_last:
            self._sums = torch.cat([self._sums, self._sums.new_tensor(self._votes())])
            self._summing = self._comm.all_reduce(self._sums, "loss", purpose=LOSS, async_op=True)
        with self._clock.phase("backward"):
            self._strategy.backward(loss)
        self.passes += self._is_watching
        self._look()

    def finish(self) -> None:
        """As the strategy's; waits for the sum of the losses too."""
        with self._clock.phase("sync"):
            self._strategy.finish()
            self._summing.wait()
        self._look()

    def clip(self, max_norm: float) -> torch.Tensor | None:
        """As the strategy's."""
        with self._clock.phase("clip"):
            return self._strategy.clip(max_norm)

    def step(self) -> bool:
        """As the strategy's."""
        is_good = self._strategy.step()
        self._look()
        return is_good

    def _look(self) -> None:
        if self._is_watching:
            self.peak.look()


def _numbers(inputs: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in inputs.values())
