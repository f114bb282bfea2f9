"""What engines share: the replicas start alike, what an engine sends is watched, and precision is autocast's."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.comm.watched import watched
from cos598d.errors import UsageError, UserError, first_line
from cos598d.records.conventions import STATE
from cos598d.strategies.base import MakeOptimizer, Module, Strategy
from cos598d.strategies.formula import Sent, TrainingSpec
from cos598d.strategies.loss_scale import LossScale
from cos598d.strategies.memory import count_memory, state_tensors
from cos598d.strategies.precision import autocast
from cos598d.strategies.state import (
    FullTensor,
    OptimizerState,
    ShardSlice,
    StateLayout,
    load_own_buffers,
    own_buffers,
    own_state_of,
    put_into_model,
    replica_pieces,
    stepped_whole,
)
from cos598d.sync.base import GradientSync
from cos598d.sync.options import DEFAULTS, SyncOptions
from cos598d.terminal.printable import printable

if TYPE_CHECKING:  # a config asks engines, so it imports them
    from cos598d.config import RunConfig


class Engine(Strategy):
    """A strategy by somebody else's code, which a subclass wraps round the model in `wrap`.

    1. `attach` verifies that the ranks' models are alike and sends rank 0's state to all, as every sync does.
    2. What the engine then sends through torch.distributed is entered in the ledger; `bytes_from` says whether that is
       all of it, or whether only the kernel's counters see it.
    3. Losses are multiplied by the number of ranks, since engines average.

    precisions: those of PRECISIONS in which it trains.
    """

    precisions: tuple[str, ...] = ("fp32", "bf16", "fp16")

    def __init__(
        self,
        comm: Communicator,
        find_unused_parameters: bool = True,
        options: SyncOptions = DEFAULTS,
        precision: str = "fp32",
    ):
        self.comm, self.options, self.precision = comm, options, precision
        self.find_unused_parameters = find_unused_parameters
        self.replica = GradientSync(comm, find_unused_parameters, options)
        self.scale = LossScale(is_on=precision == "fp16")
        self.is_finite = True
        self.choose()

    def choose(self) -> None:
        """Set `equal_passes` and `shards` where they depend on the options."""

    @classmethod
    def check_config(cls, config: "RunConfig", world_size: int) -> None:
        """Raise UsageError for a run that this engine cannot make, before the ranks meet."""
        if config.precision not in cls.precisions:
            raise UsageError(
                f"--precision {config.precision} with --sync {config.sync}: "
                f"choose {' or '.join(cls.precisions)}, or another --sync."
            )

    @property
    def loss_scale(self) -> float:
        return self.scale.value

    def attach(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Module:
        self.model, self.contents = model, StateLayout(model, make_optimizer)
        self.replica.attach(model)
        try:
            with watched(self.comm, STATE):
                module = self.wrap(model, make_optimizer)
        except ImportError as error:  # such as one that was built beside another torch
            reason = printable(first_line(error)).rstrip(".")
            raise UserError(
                f"{type(self).__name__} is installed, and cannot be imported ({reason}): run make engines."
            ) from error

        def forward(**inputs: torch.Tensor) -> tuple:
            self.before_forward()
            with watched(self.comm), self.autocast():
                return module(**inputs)

        return forward

    def wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Module:
        """Hand the model to the engine, set `optimizer`, and return what to call."""
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
        """Backward has waited already."""

    def clip(self, max_norm: float) -> torch.Tensor | None:
        self.is_finite = self.scale.unscale(self.parameters())
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm) if max_norm else None

    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer steps."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def memory(self) -> dict[str, int]:
        """As the contract says, of an engine that leaves the model whole; what it keeps to itself, such as buckets in
        C++, is not seen, and no category here."""
        return count_memory(
            parameters=[p.data for p in self.model.parameters()],
            gradients=[p.grad for p in self.model.parameters() if p.grad is not None],
            optimizer=state_tensors(self.inner_optimizer()),
        )

    def expected_sent(self, job: TrainingSpec) -> Sent:
        if job.ranks == 1:
            return Sent()
        return Sent(unsaid=f"{type(self).__name__} sends by itself and tells nobody: only the kernel counts its bytes")

    def step(self) -> bool:
        # The norm, by which it is known, is the same on every rank.
        with self.phase("step"), watched(self.comm):
            if self.is_finite:
                self.optimizer.step()
            self.scale.update(self.is_finite, self.comm.ledger.iteration)
            self.optimizer.zero_grad()  # which sets them to None
        return self.is_finite

    def state(self) -> Iterator[ShardSlice]:
        """As the contract says, of an engine that leaves the model whole on every rank."""
        return replica_pieces(self.comm, self.model, self.remembered())

    def load_state(self, wholes: Iterable[FullTensor]) -> None:
        remembered = self.remembered()
        for whole in self.contents.checked(wholes):
            if not put_into_model(self.model, whole):
                remembered.put(whole)

    def remembered(self) -> OptimizerState:
        """What this rank's optimizer remembers, by the model's names."""
        return OptimizerState(self.inner_optimizer(), stepped_whole(self.model.named_parameters()))

    def inner_optimizer(self) -> Any:
        """torch's optimizer, which the engine may have wrapped."""
        return self.optimizer

    def scalars(self) -> dict[str, Any]:
        return self.scale.state()

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        self.scale.load(scalars)

    def own_state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        return {}, own_buffers(self.comm, self.model)

    def load_own_state(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        with own_state_of(self.comm.rank):
            load_own_buffers(self.model, tensors)

    def settle(self) -> None:
        self.replica.settle()

    def detach(self) -> None:
        self.replica.detach()


class Apart:
    """A copy of a model for an engine that changes what it is given: the model itself stays plain.

    At first the copy's parameters share their memory with the model's; an engine that lays its own elsewhere, or cuts
    them, leaves the model's old values behind, which `empty` frees and `fill` replaces. Buffers are the same tensors.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        own = {id(p): nn.Parameter(p.data, requires_grad=p.requires_grad) for p in model.parameters()}
        self.copy: nn.Module = copy.deepcopy(model, own | {id(buffer): buffer for buffer in model.buffers()})
        self.is_whole = True

    def follow(self) -> None:
        """Train or evaluate as the model does."""
        if self.copy.training != self.model.training:
            self.copy.train(self.model.training)

    def empty(self) -> None:
        """Free the model's parameters, which are not the current ones any more."""
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
        raise UsageError(f"--sync {sync} needs {title}, which is not installed: run make engines.") from None
    if _numbers(found) < _numbers(least):
        raise UsageError(f"--sync {sync} needs {title} {least} or newer, and {found} is installed: run make engines.")


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" as (2, 13, 0)."""
    return tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".") if part.isdigit())
