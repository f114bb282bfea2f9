"""The interface of a strategy: which rank holds which part of a model, and the methods that the training loop calls."""

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

# Called with the parameters, or shards of them, that a rank steps, under the model's plain names.
MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
Module = Callable[..., Any]


class Strategy:
    """Owns the module, the optimizer and the communication of one replica. On every rank, the loop uses it like this:

        module = strategy.attach(model, make_optimizer)
        ...
        with strategy.no_sync():                    # for all micro-batches of a step except the last
            strategy.backward(module(...)[0] * weight)
        strategy.backward(module(...)[0] * weight)
        strategy.finish()
        strategy.clip(max_norm)
        strategy.step()
        ...
        strategy.settle()                           # before the model is evaluated, compared or saved
        strategy.detach()

    The weights of all ranks' micro-batches in a step add up to 1. So the sum of the weighted losses is the global
    batch's mean loss, and the optimizer steps by the gradient of that loss.

    `optimizer`, set by `attach`, is a torch optimizer. `step` uses the "lr" in its `param_groups` as the step's
    learning rate. It need not hold whole parameters. Only the strategy calls its `step`.

    options_kind, uses: as in a gradient sync.
    bytes_from: the source of a run's bytes: BY_LEDGER, or the kernel (BY_COUNTERS) if a library sends by itself.
    equal_layers: whether all ranks must call the same layers in a pass.
    one_host, shares_memory: as in a gradient sync.
    shards: the categories of `memory` of which a rank holds only its share between steps.

    `phase` comes from a clock. Only `step` covers two phases of an iteration: the optimizer's work is in
    `with self.phase("step")`, and its communication in `with self.phase("sync")`. Set `phase` to a clock's to measure
    them; by default it does nothing. Every other method belongs to one phase.

    The methods implemented here are those of a rank that holds the whole model and steps all of it.

    comm, find_unused_parameters, options, precision: the constructor's arguments.
    scale: fp16's loss scale. is_finite: whether the step's unscaled gradients are finite.
    model, layout: the argument of `attach`, and what its saved state consists of.
    """

    optimizer: torch.optim.Optimizer
    model: nn.Module
    layout: StateLayout
    options_kind: type[SyncOptions] = SyncOptions
    uses: tuple[str, ...] = ()
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
        self.options, self.precision = self.options_kind.of(options), precision
        self.scale = LossScale(is_on=precision == "fp16")
        self.choose()

    def choose(self) -> None:
        """Set the attributes that depend on the options: `shards`."""

    @property
    def replicas_equal(self) -> bool:
        """Whether all ranks' models have the same complete weights now, between two steps: they can be compared."""
        return True

    @property
    def loss_scale(self) -> float:
        """The factor by which fp16 multiplies this step's loss so that small gradients do not vanish; otherwise 1."""
        return self.scale.value

    def remark(self, model: nn.Module) -> str | None:
        """A sentence for the user about this strategy with this model, printed before training; None for nothing.

        Works without `attach`. The same on every rank.
        """
        return None

    def attach(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Module:
        """Take over `model` and return a callable to use in its place, whose first output is the loss.

        All replicas start from rank 0's parameters and buffers. Here the strategy decides which rank holds which part
        of the weights, gradients and optimizer state. `make_optimizer` is called with the (name, parameter) pairs that
        this rank steps, whole or in shards. It decides by the plain names which weights decay. Raises UserError, the
        same on every rank, if the ranks' models differ.
        """
        raise NotImplementedError

    def no_sync(self) -> AbstractContextManager[None]:
        """A context for forward and backward of every micro-batch of a step except the last.

        Most strategies send nothing in it, and gradients accumulate. `zero2` and `zero3` send in every micro-batch.
        """
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a micro-batch's weighted loss. It may start to send gradients."""
        raise NotImplementedError

    def finish(self) -> None:
        """Block until the gradients are the global batch's, complete or this rank's shard of them. Under fp16 they
        still have the factor by which `backward` multiplied the loss; `clip` divides it out."""
        raise NotImplementedError

    def clip(self, max_norm: float) -> torch.Tensor | None:
        """Scale the gradients down to a norm of at most `max_norm`; 0 leaves them unchanged.

        Return the norm before clipping, of the global batch's complete gradient over all ranks. With 0 it may be None,
        since nothing needs it.
        """
        self.is_finite = self.scale.unscale(self.parameters())
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm) if max_norm else None

    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients this rank steps by."""
        return list(self.model.parameters())

    def step(self) -> bool:
        """Step by these gradients and drop them. Return whether the step counts, the same on every rank.

        False means that fp16 overflowed: only the loss scale has changed, which is lower now. Raises UserError, the
        same on every rank, if it would fall below 1.
        """
        raise NotImplementedError

    def settle(self) -> None:
        """Give every rank's model all weights and buffers, equal and under their plain names, until the next step."""

    def whole(self) -> AbstractContextManager[None]:
        """A context between two steps in which every rank's model holds all of its own current weights."""
        return contextlib.nullcontext()

    def memory(self) -> dict[str, int]:
        """Bytes held now, by category: parameters, gradients, optimizer, buckets. Each storage counts once.

        A strategy that does not count returns {}.
        """
        return {}

    def expected_memory(self, job: TrainingSpec) -> MemoryEstimate:
        """What `memory` should be, by formula, on `job.rank` of `job.ranks`. It holds for this strategy's options, from
        the second step on, if every parameter is used. Works without `attach`."""
        return MemoryEstimate(unsaid="this strategy predicts no memory")

    def expected_sent(self, job: TrainingSpec) -> TrafficEstimate:
        """What `job.rank` of `job.ranks` should send per step, by formula. It holds for this strategy's options, from
        the second step on, if every parameter is used. Works without `attach`."""
        return TrafficEstimate() if job.ranks == 1 else TrafficEstimate(unsaid="this strategy predicts no bytes")

    def state(self) -> Iterator[ShardSlice]:
        """The state from which any strategy on any number of ranks can resume: weights, buffers and optimizer state.

        Every rank calls it between two steps and iterates to the end, since it may communicate. The pieces of all ranks
        together have every tensor exactly once. Rank 0 yields complete weights and buffers; optimizer state comes from
        the rank that holds it. A rank holds at most one additional layer, so a piece's values are valid until the next
        one is asked for. The training is unchanged, to the last bit. If replicas drift between averages, the state has
        the averages of their weights, and rank 0's optimizer state. Otherwise it has rank 0's.
        """
        for name, weights in self.whole_weights():
            yield ShardSlice.of_whole(WEIGHTS, name, weights)
        for name, buffer in self.model.named_buffers() if self.comm.rank == 0 else ():
            yield ShardSlice.of_whole(BUFFERS, name, buffer)  # includes buffers that `state_dict` leaves out
        if self.comm.rank == 0 or "optimizer" in self.shards:
            yield from self.optimizer_state().pieces()

    def load_state(self, wholes: Iterable[FullTensor]) -> None:
        """Load this rank's part of a saved state. Called after `attach`, before the first step.

        Every rank is given the same tensors in the same order, from `state` of any strategy; any order works. Raises
        UserError, the same on every rank, if a tensor is missing, is extra, or has another shape than the model's.
        """
        optimizer_state = self.optimizer_state()
        for whole in self.layout.checked(wholes):
            if whole.kind == WEIGHTS:
                self.put_weights(whole)
            elif not put_into_model(self.model, whole):
                optimizer_state.put(whole)

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, complete parameter) at rank 0 and nothing elsewhere. Every rank must iterate to the end."""
        return iter(self.model.named_parameters() if self.comm.rank == 0 else ())

    def put_weights(self, whole: FullTensor) -> None:
        """Set a parameter, frozen or not, to these values."""
        put_into_model(self.model, whole)

    def optimizer_state(self) -> OptimizerState:
        """This rank's optimizer state, under the model's names."""
        return OptimizerState(self.inner_optimizer(), stepped_whole(self.model.named_parameters()))

    def inner_optimizer(self) -> Any:
        """torch's optimizer, without a library's wrapper."""
        return self.optimizer

    def scalars(self) -> dict[str, Any]:
        """State that is the same on every rank and in no tensor, as JSON: fp16's loss scale."""
        return self.scale.state()

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Load the result of any strategy's `scalars`; called after `load_state`. Missing values keep their default."""
        self.scale.load(scalars)

    def own_state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """State of this rank only, as JSON and named tensors, such as error feedback or a drifting replica.

        Every rank calls it between two steps, since it may communicate. The tensors may be live memory.
        """
        return {}, own_buffers(self.comm, self.model)

    def load_own_state(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Load this rank's `own_state`, saved by the same strategy with the same options and number of ranks.

        Called after `load_state` and `load_scalars`. Every further step is then bit-for-bit what it would have been.
        Raises UserError if the state cannot belong to this rank.
        """
        with own_state_of(self.comm.rank):
            load_own_buffers(self.model, tensors)

    @property
    def own_is_lost(self) -> str | None:
        """What is lost if a run resumes without its own state, on other ranks or with another strategy, as a phrase for
        the user; None if nothing is."""
        return None

    @property
    def never_kept(self) -> str | None:
        """What is never saved, and starts from scratch after any resume, as a phrase for the user; None if nothing."""
        return None

    def detach(self) -> None:
        """Remove hooks and free training-only memory. The model stays as `settle` left it."""
