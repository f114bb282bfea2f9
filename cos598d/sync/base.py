"""The interface of a gradient sync: what happens between `loss.backward()` and `optimizer.step()`."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from cos598d.errors import UserError
from cos598d.records.conventions import AGREEMENT, BUFFERS, BY_LEDGER, STATE
from cos598d.sync.alike import check_models, sparse_weights

if TYPE_CHECKING:
    from cos598d.comm.ledger import Ledger

Named = tuple[str, nn.Parameter]


@dataclass(frozen=True)
class Options:
    """What every sync may be told. Those of more are in `options.py`, and in the file of the only sync that has one.

    find_unused_parameters: whether a step may leave a trainable parameter without a gradient on some rank. Finding out
        costs an all-reduce of 4 bytes per parameter in each step.
    broadcast_buffers: whether rank 0's buffers, such as running statistics, are sent to all ranks before the first
        forward after an average, as torch's DDP does.
    """

    find_unused_parameters: bool = True
    broadcast_buffers: bool = True

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all options of this kind."""
        return tuple(one.name for one in fields(cls))


class GradientSync:
    """One way for n replicas to agree on their gradients. `Parallel` (parallel.py) calls it like this:

        call = sync.attach(model)      # rank 0's state on every rank; what to call in the model's place
        loss.backward()                # for each gradient that backward has computed: sync.ready(parameter)
                                       # at backward's end: sync.finish(); now .grad is the average over the ranks
        optimizer.step()               # then: sync.after_step()
        sync.settle()                  # before the model is evaluated or saved: weights and buffers are equal
        sync.detach()

    The simplest kind acts after backward and implements only `average`, with plain calls of torch.distributed. The
    ledger sees them by itself.

    shards: whether each rank's optimizer steps only a part of the weights. every_backward: whether backwards inside
    `no_sync` are reduced too. replicas_equal: whether all ranks hold the same weights between two steps.
    options_kind: the class of its options. takes_sparse: whether it averages the gradients of
    `nn.Embedding(..., sparse=True)`. keeps_optimizer_state: whether a checkpoint has what the optimizer remembers.
    bytes_from: whether the ledger has its bytes, or only the kernel's counters.
    """

    shards = every_backward = takes_sparse = False
    replicas_equal = keeps_optimizer_state = True
    bytes_from = BY_LEDGER
    options_kind: type[Options] = Options
    options: Any  # of that class
    optimizer: torch.optim.Optimizer | None = None  # set by `Parallel`
    ends_step = True  # set by `Parallel`: whether the last forward of training was outside of no_sync
    buffers_are_due = True  # an average was made since rank 0's buffers were sent

    def __init__(self, ledger: "Ledger", options: Options | None = None, group: dist.ProcessGroup | None = None):
        """`group`: the ranks that train the model; None for all of them."""
        self.ledger, self.options, self.group = ledger, options or self.options_kind(), group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.parameters: list[Named] = []

    def __deepcopy__(self, memo: dict) -> "GradientSync":
        """A copy of a model has copies of its hooks, and they belong to this sync as before."""
        return self

    @classmethod
    def check_run(cls, ranks: int, precision: str) -> None:
        """Raise UsageError, before the ranks meet, if it cannot train on so many ranks, or in this precision."""

    # What `Parallel` calls

    def attach(self, model: nn.Module) -> Callable:
        """Make every rank's model equal rank 0's. Return what to call in its place.

        Trainable parameters, frozen ones and buffers are sent; tied weights once. Raises UserError, the same on every
        rank, if the ranks' models differ, or if a gradient will come that this sync cannot average.
        """
        self.model = model
        check_models(model, self.exchange)
        self.sparse = sparse_weights(model)
        for name, p in model.named_parameters():
            if p in self.sparse and not self.takes_sparse:
                raise UserError(
                    f"{name} has sparse gradients, which {type(self).__name__} does not average. Choose all_reduce or "
                    "ddp, or make the layer without sparse=True."
                )
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self.broadcast([tensor], name, STATE)
        # A tensor without elements is on all ranks what it is.
        self.parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.numel()]
        return model

    def take_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer that the script steps: this one, or that of a library, made from it."""
        return optimizer

    def begin_forward(self) -> None:
        """A forward is about to begin, of training or of evaluation."""
        if self.buffers_are_due and self.options.broadcast_buffers:
            self.send_buffers()

    def ready(self, parameter: nn.Parameter) -> None:
        """Backward has computed this parameter's .grad. It may start to send it."""

    def finish(self) -> None:
        """Block until every .grad is the average over the ranks. A parameter that no rank used keeps None."""
        for name, gradient in self.gradients():
            with self.ledger.naming(name):
                self.average(name, gradient)

    def average(self, name: str, gradient: torch.Tensor) -> None:
        """Replace `gradient` by its average over the ranks, in place. Called in the same order on every rank."""
        raise NotImplementedError(f"{type(self).__name__} has no average()")

    def after_step(self) -> None:
        """The optimizer has stepped."""

    def no_sync(self) -> AbstractContextManager[None]:
        """A context for a library that has to be told that a backward only accumulates."""
        return nullcontext()

    def settle(self) -> None:
        """Make the ranks' models equal: give every rank rank 0's buffers, and shared weights if they differ."""
        self.send_buffers()

    def own_state(self) -> dict[str, torch.Tensor]:
        """What this rank keeps from one step to the next, by name, for a checkpoint. Every rank calls it, settled."""
        return {}

    def load_own_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what the same rank's `own_state` gave. Called after `attach`, before the first step."""

    def detach(self) -> None:
        """Remove hooks and free buffers. The model does not change."""
        self.parameters = []

    # What syncs call

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The gradients to average, the same on every rank: real numbers, in the order of the parameter's memory.

        A rank without one that others have gets zeros.
        """
        seen: set[int] = set()
        found = []  # as a whole: what is copied must not wait until a call that was begun writes into it
        for (name, p), used in zip(self.parameters, self.used(), strict=True):
            if not used:
                continue
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if p in self.sparse:
                p.grad = p.grad if p.grad.is_sparse else p.grad.to_sparse(1)
                found.append((name, p.grad))
                continue
            if p.grad.data_ptr() in seen or p.grad.stride() != p.stride() or p.grad.is_conj():
                p.grad = torch.empty_like(p).copy_(p.grad)  # another's memory, or another order of elements
            seen.add(p.grad.data_ptr())
            found.append((name, torch.view_as_real(p.grad) if p.is_complex() else p.grad))
        yield from found

    def used(self) -> list[bool]:
        """Whether any rank has a gradient, for each parameter."""
        return self.agree([p.grad is not None for _, p in self.parameters])

    def agree(self, has: list[bool]) -> list[bool]:
        """Whether any rank has what this one `has`, for each parameter: a small all-reduce.

        With find_unused_parameters off, nothing is sent: raises UserError if this rank lacks one. zero2, zero3 and
        sparse_zero1 send it always, with a second question.
        """
        if not self.options.find_unused_parameters:
            if not all(has):
                raise UserError(
                    f"{self.parameters[has.index(False)][0]} got no gradient in this step, although "
                    "find_unused_parameters is False. Give find_unused_parameters=True for a model that leaves "
                    "parameters unused."
                )
            return has
        return [users > 0 for users in self.count(has)]

    def count(self, numbers: Sequence[int]) -> list[int]:
        """The sums of these small numbers over the ranks, of which every rank gives as many: a small all-reduce."""
        sums = torch.tensor(numbers, dtype=torch.int32, device=self.device)
        with self.ledger.naming("ranks that used each parameter", AGREEMENT):
            dist.all_reduce(sums, group=self.group)
        return sums.tolist()

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's `value` (JSON), in order of rank. For small values before training. Nothing is unpickled.

        1. The ranks agree on the length of the longest text.
        2. Each gathers all texts, which end in spaces up to that length.
        """
        text = json.dumps(value).encode()
        device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        with self.ledger.naming("what the ranks tell each other", AGREEMENT):
            longest = torch.tensor([len(text)], device=device)
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.group)
            own = torch.tensor(list(text.ljust(int(longest))), dtype=torch.uint8, device=device)
            texts = [torch.empty_like(own) for _ in range(self.ranks)]
            dist.all_gather(texts, own, group=self.group)
        return [json.loads(bytes(each.tolist())) for each in texts]

    def broadcast(self, tensors: Iterable[torch.Tensor], name: str, purpose: str) -> None:
        """Put rank 0's tensors into each rank's, packed as bytes: in one call, whatever their dtypes and strides."""
        # .data: the graph of an earlier forward may have saved a buffer, as with torch's DDP
        data = [tensor.data for tensor in tensors if tensor.numel()]
        if data and self.ranks > 1:
            parts = [each.contiguous().view(-1).view(torch.uint8) for each in data]
            together = torch.cat(parts)
            with self.ledger.naming(name, purpose):
                dist.broadcast(together, self.peer(0), group=self.group)
            for each, part in zip(data, together.split([len(part) for part in parts]), strict=True):
                each.copy_(part.clone().view(each.dtype).view(each.shape))

    def send_buffers(self) -> None:
        """Give every rank rank 0's buffers."""
        self.buffers_are_due = False
        self.broadcast(self.model.buffers(), "buffers", BUFFERS)

    def peer(self, rank: int) -> int:
        """The number of this group's rank among all processes, as torch needs it."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.parameters[0][1].device
