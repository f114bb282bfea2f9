"""What all engines share: equal initial replicas, a log of what an engine sends, and precision by autocast."""

import copy
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from cos598d.comm.watched import watched
from cos598d.errors import UsageError, UserError, first_line
from cos598d.records.conventions import AUTO_PRECISION, STATE
from cos598d.strategies.base import MakeOptimizer, Module, Strategy
from cos598d.strategies.formula import TrafficEstimate, TrainingSpec
from cos598d.strategies.memory import count_memory, state_tensors
from cos598d.strategies.precision import autocast
from cos598d.strategies.state import StateLayout
from cos598d.sync.base import GradientSync
from cos598d.terminal.printable import printable


class Engine(Strategy):
    """A strategy by another library, which a subclass puts around the model in `wrap`.

    1. `attach` verifies that the ranks' models are alike and sends rank 0's state to all, as every sync does.
    2. The ledger gets what the engine then sends through torch.distributed. `bytes_from` is BY_LEDGER if that is all of
       it, else BY_COUNTERS: only the kernel's counters see the rest.
    3. Losses are multiplied by the number of ranks, since engines average.

    precisions: those of PRECISIONS in which it trains.
    """

    precisions: tuple[str, ...] = ("fp32", "bf16", "fp16")

    @classmethod
    def check_config(cls, config: Any, world_size: int) -> None:
        """Raise UsageError, before the ranks meet, if this engine cannot run with this RunConfig."""
        if config.precision not in (*cls.precisions, AUTO_PRECISION):
            raise UsageError(
                f"--precision {config.precision} does not work with --sync {config.sync}. Choose "
                f"{' or '.join(cls.precisions)}, or another --sync."
            )

    def attach(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Module:
        self.model, self.layout = model, StateLayout(model, make_optimizer)
        self.replica = GradientSync(self.comm, self.find_unused_parameters, self.options)
        self.replica.attach(model)
        try:
            with watched(self.comm, STATE):
                module = self.wrap(model, make_optimizer)
        except ImportError as error:  # such as one that was built for another version of torch
            reason = printable(first_line(error)).rstrip(".")
            raise UserError(
                f"{type(self).__name__} is installed but cannot be imported ({reason}). Run `make engines`."
            ) from error

        def forward(**inputs: torch.Tensor) -> tuple:
            self.before_forward()
            with watched(self.comm), self.autocast():
                return module(**inputs)

        return forward

    def wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Module:
        """Hand the model to the engine, set `optimizer`, and return the callable to train with."""
        raise NotImplementedError

    def before_forward(self) -> None:
        """Called before each forward of training."""

    def autocast(self) -> AbstractContextManager[None]:
        """The context in which the model computes."""
        return autocast(self.precision, self.comm.device)

    def backward(self, loss: torch.Tensor) -> None:
        with watched(self.comm):
            (loss * (self.comm.world_size * self.loss_scale)).backward()

    def finish(self) -> None:
        """Nothing to wait for: backward has waited."""

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimizer steps."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def memory(self) -> dict[str, int]:
        """As in the interface, for an engine that leaves the model whole. Its private memory, such as buckets in C++,
        is not visible and in no category."""
        return count_memory(
            parameters=[p.data for p in self.model.parameters()],
            gradients=[p.grad for p in self.model.parameters() if p.grad is not None],
            optimizer=state_tensors(self.inner_optimizer()),
        )

    def expected_sent(self, job: TrainingSpec) -> TrafficEstimate:
        if job.ranks == 1:
            return TrafficEstimate()
        return TrafficEstimate(
            unsaid=f"{type(self).__name__} does not report its calls, so only the kernel counts its bytes"
        )

    def step(self) -> bool:
        # All ranks have the same norm, so they skip the same steps.
        with self.phase("step"), watched(self.comm):
            if self.is_finite:
                self.optimizer.step()
            self.scale.update(self.is_finite, self.comm.ledger.iteration)
            self.optimizer.zero_grad()  # sets the gradients to None
        return self.is_finite

    def settle(self) -> None:
        self.replica.settle()

    def detach(self) -> None:
        self.replica.detach()


class Apart:
    """A copy of a model for an engine that changes its model; the model itself stays plain.

    At first the copy's parameters share memory with the model's. An engine may move or shard the copy's. The model then
    still has the old values: `empty` frees them, and `fill` replaces them. The buffers are the same tensors.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        own = {id(p): nn.Parameter(p.data, requires_grad=p.requires_grad) for p in model.parameters()}
        self.copy: nn.Module = copy.deepcopy(model, own | {id(buffer): buffer for buffer in model.buffers()})
        self.is_whole = True

    def follow(self) -> None:
        """Set the copy to training or evaluation mode, as the model is."""
        if self.copy.training != self.model.training:
            self.copy.train(self.model.training)

    def empty(self) -> None:
        """Free the model's parameters, which are outdated now."""
        for p in self.model.parameters():
            p.data = p.data.new_empty(0)
        self.is_whole = False

    def fill(self, name: str, whole: torch.Tensor) -> None:
        """Make `whole` the model's parameter of that name, without a copy."""
        self.model.get_parameter(name).data = whole.detach().view(self._shapes[name])


def need(package: str, title: str, least: str, sync: str) -> None:
    """Raise UsageError unless `package` is installed, at version `least` or newer."""
    try:
        found = version(package)
    except PackageNotFoundError:
        raise UsageError(f"--sync {sync} needs {title}, which is not installed. Run `make engines`.") from None
    if _numbers(found) < _numbers(least):
        raise UsageError(f"--sync {sync} needs {title} {least} or newer, and {found} is installed. Run `make engines`.")


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" as (2, 13, 0)."""
    return tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".") if part.isdigit())
