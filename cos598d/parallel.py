"""The one door: a model and an optimizer that all ranks train together. The trainer calls it as any script does."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from cos598d.comm.ledger import Ledger
from cos598d.errors import UsageError, UserError
from cos598d.state import load_model, load_optimizer, model_state, optimizer_state
from cos598d.sync import get_sync
from cos598d.sync.base import GradientSync
from cos598d.sync.hooks import weakly
from cos598d.sync.options import Options, or_choose
from cos598d.terminal.fields import check_flags


def parallelize(
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    sync: str | type[GradientSync] = "bucketed",
    *,
    group: dist.ProcessGroup | None = None,
    ledger: Ledger | None = None,
    **options: Any,
) -> tuple["Parallel", torch.optim.Optimizer]:
    """Wrap a model and make its optimizer, so that all ranks train it together. Every rank calls it.

    make_optimizer: called once with the model's parameters; it may make groups of them. sync: a registered name
    (`bucketed`, `ring`, `zero3`, ...), FILE.py:CLASS, or a class. group: the ranks that train; torch's default group if
    None. ledger: what names the calls; `with ledger:` records them. options: those of the sync, such as `bucket_mb`
    (`sync/options.py`).

    Under syncs that shard, the optimizer steps this rank's parts of the parameters. So it must treat every element by
    itself, as SGD and AdamW do.

    Raises UserError for a sync or an option that does not exist or does not fit, and where the ranks' models differ.
    """
    made = make_sync(sync, group, ledger, **options)
    parallel = Parallel(model, made, make_optimizer(list(model.parameters())))
    return parallel, parallel.optimizer


def data_parallel(
    model: nn.Module,
    sync: str | type[GradientSync] = "bucketed",
    **options: Any,
) -> "Parallel":
    """Wrap a model where `DistributedDataParallel(model)` stood, with one of our gradient syncs. Every rank calls it.

    The arguments are those of `parallelize`. The optimizer is the script's own affair, so the sync must average
    gradients: one that shards, or averages weights after the step, needs `parallelize`.
    """
    made = make_sync(sync, **options)
    if made.shards or type(made).after_step is not GradientSync.after_step:
        raise UsageError(
            f"{getattr(sync, '__name__', sync)} acts in the optimizer's step, which data_parallel does not see. Call "
            "parallelize(model, make_optimizer, sync), or choose another sync."
        )
    return Parallel(model, made)


class Parallel(nn.Module):
    """A replica of the model. When `backward()` returns, the ranks have averaged their gradients, as with torch's DDP.

    Every .grad is the average then. Under syncs that shard, each rank has only its part of it, and .grad refuses to be
    read: clip by `clip_grad_norm_`, which knows the whole norm.

    1. Made on every rank at once, it sends rank 0's parameters and buffers to all (the sync's `attach`).
    2. The output of `forward` has a hook. When backward reaches it, autograd is asked to call back at backward's end.
    3. A hook on each parameter tells the sync that its gradient is there (`ready`). It is on the node that adds up the
       gradient, as DDP's, so the script's own hooks have run before.
    4. At backward's end the sync's `finish` runs.

    As with DDP, a backward whose forward was inside `no_sync` only adds to this rank's gradients. A second backward
    before the optimizer's step averages again, and torch.autograd.grad() averages nothing. A backward must reach at
    least one parameter on every rank, or none on any. Two of these modules in one backward need a process group each if
    a rank may leave parameters unused.

    `module` is the model itself, under whose plain names `state_dict` and `load_state_dict` work. `phase("sync")` is
    the context of the sync's own work, for whoever times it.
    """

    phase: Callable[[str], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    _call: Callable

    def __init__(self, module: nn.Module, sync: GradientSync, optimizer: torch.optim.Optimizer | None = None):
        super().__init__()
        self.module, self.sync = module, sync
        shards: Any = sync
        self._shards = shards if sync.shards else None  # it has more methods than others, as `zero.zero1.Zero1`
        self.require_backward_grad_sync = True  # DDP's word: whether the next forward's backward averages
        self._averages = True  # whether the last forward's does
        self._is_asked = False  # autograd is to call back at the end of this backward
        self._has_begun = False  # gradients have come since the last average
        self.__dict__["_call"] = sync.attach(module)  # no child of this module, whatever it is
        self.optimizer: Any = None if optimizer is None else sync.take_optimizer(optimizer)
        sync.optimizer = self.optimizer
        self._trained = {p for p in module.parameters() if p.requires_grad}
        # Kept, because torch keeps neither the nodes nor their hooks.
        self._nodes = [get_gradient_edge(p).node for _, p in sync.parameters]
        hooked = zip(self._nodes, sync.parameters, strict=True)
        self._hooks = [node.register_hook(weakly(self._on_gradient, p)) for node, (_, p) in hooked]
        if self.optimizer is not None:
            if self._shards:
                self._shards.shard(self.optimizer)
            self._hooks.append(self.optimizer.register_step_post_hook(lambda *_: self._after_step()))

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The model's own forward. Raises UserError if the model is not the one that was wrapped any more."""
        if torch._C._current_graph_task_id() != -1:  # inside backward, where a checkpoint computes it again
            return self._call(*inputs, **keywords)
        trains = torch.is_grad_enabled()
        if trains:
            self._check()
            self._averages, self._is_asked = self.require_backward_grad_sync, False
        self.sync.begin_forward()
        output = self._call(*inputs, **keywords)
        self.sync.ends_step = self._averages
        if trains and (self._averages or self.sync.every_backward):
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                    leaf.register_hook(self._ask)  # here, since a checkpointed layer runs a backward of its own
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context for forward and backward of every micro-batch of a step except the last."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            with self.sync.no_sync():
                yield
        finally:
            self.require_backward_grad_sync = before

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the averaged gradient down to this L2 norm at most. Return the norm that it had, over all ranks."""
        if self._shards:
            return self._shards.clip(max_norm)
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def settle(self) -> None:
        """Make every rank's model whole and equal, weights and buffers, until the next step. Every rank calls it."""
        self.sync.settle()

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The training under the model's plain names, whole: ("weights/NAME", tensor), "buffers/..", "exp_avg/..".

        Every rank iterates to the end. Any sync on any number of ranks can load it. Values are valid until the next.
        """
        self.settle()
        yield from model_state(self.module)
        if self._shards:
            yield from self._shards.whole_state()
        elif self.optimizer is not None:
            yield from optimizer_state(self.optimizer, self.module)

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from a `state`, whole on every rank. Called before the first step."""
        self.settle()
        load_model(self.module, state)
        if self._shards:
            self._shards.load_whole(state)
        elif self.optimizer is not None:
            load_optimizer(self.optimizer, self.module, state)

    def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        """The model's own, under its plain names."""
        return self.module.state_dict(*arguments, **keywords)

    def load_state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        """The model's own, under its plain names."""
        return self.module.load_state_dict(*arguments, **keywords)

    def detach(self) -> nn.Module:
        """Remove all hooks and return the model, which is the caller's own again."""
        for hook in self._hooks:
            hook.remove()
        self.settle()
        self.sync.detach()
        self._hooks, self._nodes = [], []
        self.__dict__["_call"] = self.module
        return self.module

    def __deepcopy__(self, memo: dict) -> "Parallel":
        raise UserError(
            "a wrapped model cannot be copied, since a copy has no ranks to train with. Copy the model itself: "
            "copy.deepcopy(wrapped.module)."
        )

    def _check(self) -> None:
        """Raise UserError if a step cannot begin."""
        if self._has_begun:
            raise UserError(
                "this rank's last backward ended in an exception after it had sent gradients, and the other ranks may "
                "wait for the rest of them. End the program on every rank, and fix the exception."
            )
        for name, p in self.module.named_parameters():
            if p.requires_grad and p not in self._trained:
                raise UserError(
                    f"{name} was frozen when the model was wrapped, or is not the parameter that was there. Change the "
                    "model before it is wrapped, or detach() and wrap it again."
                )

    def _ask(self, *_: Any) -> None:
        """Let autograd call back when this backward ends."""
        if not self._is_asked:
            self._is_asked = True
            torch.autograd.Variable._execution_engine.queue_callback(self._at_the_end)

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if self._averages or self.sync.every_backward:
            self._ask()
            self._has_begun = True
            with torch.no_grad():
                self.sync.ready(parameter)

    def _after_step(self) -> None:
        with self.phase("sync"):
            self.sync.after_step()

    def _at_the_end(self) -> None:
        self._is_asked = False
        if self._has_begun:  # else it was torch.autograd.grad, which leaves .grad alone, or all are frozen
            with torch.no_grad(), self.phase("sync"):
                self.sync.finish()
            self._has_begun, self.sync.buffers_are_due = False, True


def make_sync(
    sync: str | type[GradientSync],
    group: dist.ProcessGroup | None = None,
    ledger: Ledger | None = None,
    **options: Any,
) -> GradientSync:
    """The sync of that name or class, over `group`, with these options.

    Raises UsageError for a sync or an option that does not exist, or has a value that cannot be.
    """
    kind = get_sync(sync) if isinstance(sync, str) else sync
    for word in options:
        if word not in kind.takes:
            raise UsageError(
                f"{word} has no effect with {getattr(sync, '__name__', sync)}. Leave it out{or_choose(word)}."
            )
    made = Options(**options)
    check_flags(made)
    return kind(ledger or Ledger(), made, group)
