"""The contract of a strategy: who holds which part of a model while it trains, and what the training loop calls."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.records.conventions import BY_LEDGER
from cos598d.strategies.formula import MemoryEstimate, TrafficEstimate, TrainingSpec
from cos598d.strategies.precision import LossScale
from cos598d.strategies.state import (
    BUFFERS,
    WEIGHTS,
    FullTensor,
    OptimizerState,
    ShardSlice,
    StateLayout,
    load_own_buffers,
    own_buffers,
    own_state_of,
    put_into_model,
    stepped_whole,
)
from cos598d.sync.options import DEFAULTS, SyncOptions

# From the parameters that a rank is to step, or its shards of them, under the model's plain names.
MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
Module = Callable[..., Any]


class Strategy:
    """What owns module, optimizer and communication of one replica. The loop uses it like this, on every rank:

        module = strategy.attach(model, make_optimizer)
        ...
        with strategy.no_sync():                    # for all micro-batches of a step but the last
            strategy.backward(module(...)[0] * weight)
        strategy.backward(module(...)[0] * weight)
        strategy.finish()
        strategy.clip(max_norm)
        strategy.step()
        ...
        strategy.settle()                           # before the model is evaluated, compared or saved
        strategy.detach()

    The weights of all ranks' micro-batches in a step add up to 1: the sum of the weighted losses is the global batch's
    mean loss, and its gradient is what the optimizer steps by.

    `optimizer`, there after `attach`, is a torch optimizer. The "lr" in its `param_groups` when `step` is called is the
    step's learning rate. It need not hold whole parameters. Only the strategy calls its `step`.

    uses: the names of the SyncOptions that mean anything to it.
    equal_passes: whether all ranks must call forward and backward the same number of times in a step.
    bytes_from: where a run's bytes come from: BY_LEDGER, or the kernel (BY_COUNTERS) where a library sends.
    equal_layers: whether all ranks must call the same layers in a pass.
    one_host, shares_memory: as a gradient sync's.
    shards: the categories of `memory` of which a rank holds no more than its share between steps.

    `phase` is a clock's. The work of `step` belongs to two phases of an iteration: it encloses the optimizer's in
    `with self.phase("step")`, and what is sent in `with self.phase("sync")`. Whoever measures sets a clock's `phase`
    here; until then it does nothing. The other methods belong to one phase each.

    The methods that are implemented here are those of a rank which holds the whole model and steps all of it.

    comm, find_unused_parameters, options, precision: what it is made with.
    scale: fp16's loss scale. is_finite: whether it left the gradients of this step finite numbers.
    model, layout: what `attach` was given, and what its saved state consists of.
    """

    optimizer: torch.optim.Optimizer
    model: nn.Module
    layout: StateLayout
    uses: tuple[str, ...] = ()
    equal_passes = False
    bytes_from = BY_LEDGER
    equal_layers = False
    one_host = shares_memory = False
    shards: tuple[str, ...] = ()
    phase: Callable[[str], AbstractContextManager[Any]] = contextlib.nullcontext
    scale = LossScale(is_on=False)
    is_finite = True

    def __init__(
        self,
        comm: Communicator,
        find_unused_parameters: bool = True,
        options: SyncOptions = DEFAULTS,
        precision: str = "fp32",
    ):
        """`precision` is one of PRECISIONS."""
        self.comm, self.find_unused_parameters = comm, find_unused_parameters
        self.options, self.precision = options, precision
        self.scale = LossScale(is_on=precision == "fp16")
        self.choose()

    def choose(self) -> None:
        """Set what depends on the options: `equal_passes`, `shards`."""

    @property
    def replicas_equal(self) -> bool:
        """Whether every rank's model holds the same whole weights now, between two steps, and can be held to it."""
        return True

    @property
    def loss_scale(self) -> float:
        """The factor of this step by which fp16 keeps small gradients from vanishing; 1 without it."""
        return self.scale.value

    def remark(self, model: nn.Module) -> str | None:
        """What the user should know of this strategy with this model before it trains, in a sentence; None for nothing.

        May be asked without `attach`, and is the same on every rank."""
        return None

    def attach(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Module:
        """Take over `model` and return what to call in its place; the first of what that gives is the loss.

        The replicas start alike, from rank 0's parameters and buffers, and who holds which part of weights, gradients
        and optimizer state is decided here. `make_optimizer` is called with the parameters that this rank steps, or
        its shards of them, and their plain names, by which it chooses whose weights decay.
        Raises UserError, the same on every rank, where the ranks' models differ.
        """
        raise NotImplementedError

    def no_sync(self) -> AbstractContextManager[None]:
        """A context that covers forward and backward of a micro-batch that is not its step's last: gradients add up."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a micro-batch's weighted loss. A step's last call may start what is sent."""
        raise NotImplementedError

    def finish(self) -> None:
        """Block until the gradients are the global batch's, whole or this rank's shard of them. Under fp16 they are too
        large by what `backward` has multiplied the loss by, which `clip` divides out."""
        raise NotImplementedError

    def clip(self, max_norm: float) -> torch.Tensor | None:
        """Scale the gradients down to a norm of at most `max_norm`; 0 leaves them as they are.

        The norm is that of the global batch's whole gradient, whoever holds its parts, and is returned as it was before
        clipping; None with 0, which need not know it.
        """
        self.is_finite = self.scale.unscale(self.parameters())
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm) if max_norm else None

    def parameters(self) -> list[nn.Parameter]:
        """What has the gradients that this rank steps by."""
        return list(self.model.parameters())

    def step(self) -> bool:
        """Step by these gradients and drop them; return whether the step counts, the same on every rank.

        False: fp16 overflowed. The step has left no trace then, but a lower loss scale. Raises UserError, the same on
        every rank, where that would fall below 1.
        """
        raise NotImplementedError

    def settle(self) -> None:
        """Make every rank's model whole and equal, weights and buffers, under its plain names, until the next step."""

    def whole(self) -> AbstractContextManager[None]:
        """A context between two steps in which every rank's model holds all of its own weights, as they are now."""
        return contextlib.nullcontext()

    def memory(self) -> dict[str, int]:
        """Bytes that are held now, by category: parameters, gradients, optimizer, buckets; each storage once.

        A strategy that does not count says nothing.
        """
        return {}

    def expected_memory(self, job: TrainingSpec) -> MemoryEstimate:
        """What `memory` should come to by formula on `job.rank` of `job.ranks`, with this strategy's options, from the
        second step on and with every parameter used. May be asked without `attach`."""
        return MemoryEstimate(unsaid="this strategy predicts no memory")

    def expected_sent(self, job: TrainingSpec) -> TrafficEstimate:
        """What `job.rank` of `job.ranks` should send in a step by formula, with this strategy's options, from the
        second step on and with every parameter used. May be asked without `attach`."""
        return TrafficEstimate() if job.ranks == 1 else TrafficEstimate(unsaid="this strategy predicts no bytes")

    def state(self) -> Iterator[ShardSlice]:
        """What any strategy on any number of ranks can resume from: weights, buffers, and what the optimizer remembers.

        Called on every rank between two steps, and taken to its end there, since it may communicate. The pieces of all
        ranks together have every tensor exactly once: weights and buffers whole, from rank 0 alone, the optimizer's
        state from whoever holds it. No rank holds more than a layer next to its own, so a piece's values are good until
        the next one is asked for. The training is left as it was, to the last bit. Of replicas that part and
        are averaged now and then it has the averages of their weights, and rank 0's optimizer; of others rank 0's.
        """
        for name, weights in self.whole_weights():
            yield ShardSlice.of_whole(WEIGHTS, name, weights)
        for name, buffer in self.model.named_buffers() if self.comm.rank == 0 else ():
            yield ShardSlice.of_whole(BUFFERS, name, buffer)  # those that `state_dict` leaves out, too
        if self.comm.rank == 0 or "optimizer" in self.shards:
            yield from self.optimizer_state().pieces()

    def load_state(self, wholes: Iterable[FullTensor]) -> None:
        """Take what this rank holds from a state; called after `attach`, before the first step.

        Every rank is given the same tensors in the same order, in whichever: `state`'s of any strategy. Raises
        UserError, the same on every rank, for one that is too many, too few, or of another shape than the model's.
        """
        optimizer_state = self.optimizer_state()
        for whole in self.layout.checked(wholes):
            if whole.kind == WEIGHTS:
                self.put_weights(whole)
            elif not put_into_model(self.model, whole):
                optimizer_state.put(whole)

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter whole, by name, at rank 0; nothing elsewhere, though every rank has to ask to the end."""
        return iter(self.model.named_parameters() if self.comm.rank == 0 else ())

    def put_weights(self, whole: FullTensor) -> None:
        """These are the values of a parameter from now on, of a frozen one too."""
        put_into_model(self.model, whole)

    def optimizer_state(self) -> OptimizerState:
        """What this rank's optimizer remembers, by the model's names."""
        return OptimizerState(self.inner_optimizer(), stepped_whole(self.model.named_parameters()))

    def inner_optimizer(self) -> Any:
        """torch's optimizer, which a library may have wrapped."""
        return self.optimizer

    def scalars(self) -> dict[str, Any]:
        """What the ranks know together next to the state, as JSON, the same on each: fp16's loss scale."""
        return self.scale.state()

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Take what `scalars` gave, of any strategy; called after `load_state`. What is not in it begins again."""
        self.scale.load(scalars)

    def own_state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What this rank alone remembers, as JSON and as named tensors: a codec's error feedback, replicas that part.

        Called on every rank between two steps, since it may communicate. The tensors may lie in live memory.
        """
        return {}, own_buffers(self.comm, self.model)

    def load_own_state(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Take what this rank's `own_state` gave, under the same strategy with the same options on as many ranks.

        Called after `load_state` and `load_scalars`; then every further step is to the last bit what it would have
        been. Raises UserError if it cannot be theirs.
        """
        with own_state_of(self.comm.rank):
            load_own_buffers(self.model, tensors)

    @property
    def own_is_lost(self) -> str | None:
        """What is not carried over where a run resumes without its own state, with other ranks or under another
        strategy, in words; None where that is nothing to be missed."""
        return None

    @property
    def never_kept(self) -> str | None:
        """What begins again in any case, in words; None where that is nothing."""
        return None

    def detach(self) -> None:
        """Remove hooks and free what was kept for training; the model stays as `settle` left it."""
