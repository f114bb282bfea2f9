"""The interface of a gradient sync: what the training loop calls, and what every way of averaging must guarantee."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from cos598d.errors import UserError
from cos598d.records.conventions import STATE
from cos598d.sync.agreement import Agreement
from cos598d.sync.alike import check_models, sparse_weights
from cos598d.sync.facts import SyncFacts
from cos598d.sync.options import DEFAULTS, SyncOptions

if TYPE_CHECKING:
    from cos598d.comm.communicator import Communicator


class GradientSync(Agreement, SyncFacts):
    """One way for replicas to agree on their gradients. The loop uses it like this:

        module = sync.attach(model)          # rank 0's state on every rank
        ...
        with sync.no_sync():                 # for all micro-batches of a step except the last
            module(...).backward()
        module(...).backward()
        sync.finish()                        # every rank's .grad is the average over ranks
        optimizer.step()
        sync.after_step()                    # for syncs that average weights instead
        # or, if the gradients are not finite and fp16's loss scale is lowered, only:
        sync.forget_step()                   # the step leaves no trace
        ...
        sync.settle()                        # before the model is evaluated or saved: weights and buffers are equal
        sync.detach()

    The simplest kind acts after backward, and implements only `average`. Reach other ranks only through `self.comm`.

    `find_unused_parameters` (as in torch's DDP): whether a step may leave a trainable parameter without a gradient on
    some rank. If so the ranks agree on each step's set before they average (`cos598d/sync/agreement.py`). If not, a
    missing gradient is an error.

    Buffers, such as BatchNorm's running statistics, follow each rank's own examples during training. `settle` gives
    rank 0's to all ranks, so that the model that is evaluated and saved is the one that torch's DDP makes. DDP also
    sends rank 0's before every step, which matters only for a buffer that training reads. `--sync ddp` does so, and
    `data_parallel` too, by calling `settle` there.

    `loss_scale`: the factor of this step's losses, and so of its gradients; 1 except in fp16. The loop sets it before
    backward. It differs from step to step, so a sync that keeps part of a gradient keeps it divided by `loss_scale`.

    The options, cost, memory and checkpoint of a sync have defaults that suit most syncs: `cos598d/sync/facts.py`.
    """

    loss_scale = 1.0

    def __init__(self, comm: "Communicator", find_unused_parameters: bool = True, options: SyncOptions = DEFAULTS):
        self.comm = comm
        self.find_unused_parameters = find_unused_parameters
        self.options = self.options_kind.of(options)
        self.parameters: list[tuple[str, nn.Parameter]] = []
        self._sparse: set[torch.Tensor] = set()

    def attach(self, model: nn.Module) -> nn.Module:
        """Make every rank's model equal rank 0's and return the module to call in its place.

        Trainable parameters, frozen ones and buffers are sent; tied weights once. Raises UserError, the same on every
        rank, if the ranks' parameters differ in name, order, shape, dtype or requires_grad. Also raises it if a tensor
        cannot be sent, or if this sync cannot average a sparse gradient that will come.
        """
        check_models(self.comm, model)
        self._sparse = sparse_weights(model)
        if self._sparse and not self.takes_sparse:
            name = next(name for name, p in model.named_parameters() if p in self._sparse)
            raise UserError(
                f"{name} has sparse gradients, which {type(self).__name__} does not average. Choose all_reduce, "
                "overlap or ddp, make the layer without sparse=True, or set takes_sparse = True in your own class."
            )
        with torch.no_grad():
            buffers = model.named_buffers() if self.options.broadcast_buffers else ()
            for name, tensor in (*model.named_parameters(), *buffers):
                self.comm.broadcast(tensor.data, name, purpose=STATE)
        self.parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._model = model
        return model

    def finish(self) -> None:
        """Block until every trainable parameter's .grad is the average over all ranks, on every rank.

        A parameter that no rank used keeps None; where only some ranks used it, the others count as zero.
        """
        for name, gradient in self.gradients():
            self.average(name, gradient)

    def average(self, name: str, gradient: torch.Tensor) -> None:
        """Replace `gradient` by its average over the ranks, in place. Called in the same order on every rank."""
        raise NotImplementedError(f"{type(self).__name__} has no average()")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context for forward and backward in which gradients only accumulate."""
        yield

    def detach(self) -> None:
        """Remove hooks and free buffers. The model does not change."""
        self.parameters = []
        self._model = None
