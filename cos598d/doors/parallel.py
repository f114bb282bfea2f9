"""Our gradient syncs in anybody's script: as with torch's DDP, gradients are averaged when backward returns."""

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from cos598d.comm.group import GroupCommunicator, TensorLedger
from cos598d.errors import UsageError, UserError, flag_called
from cos598d.strategies import options_kind_of
from cos598d.strategies.choose_precision import slow_halves
from cos598d.sync import SYNCS, get_sync, or_choose, unknown
from cos598d.sync.alike import check_models
from cos598d.sync.base import GradientSync
from cos598d.sync.codecs import get_codec
from cos598d.sync.options import SyncOptions
from cos598d.sync.parts import own_loop
from cos598d.terminal.fields import check_flags
from cos598d.terminal.own_code import is_own

# What a script calls on torch's DDP and not here, and what takes its place.
IN_PLACE_OF = {
    "join": "Give every rank the same number of batches, as DistributedSampler does, or keep torch's DDP.",
    "register_comm_hook": "Give data_parallel compress=, or sync= a class of your own.",
    "_set_static_graph": "Leave it out, and give data_parallel find_unused_parameters=False.",
}


class DataParallel(nn.Module):
    """A replica whose gradients are the average over all ranks when `backward()` returns.

    1. Made on every rank at once, it sends rank 0's parameters and buffers to all (the sync's `attach`).
       With `broadcast_buffers` it sends rank 0's buffers again before each forward that follows a synced one, as DDP.
    2. The output of `forward` has a hook: when backward reaches it, autograd is asked to call back at its end.
    3. The sync's own hooks see each gradient as it is computed; at backward's end the callback runs its `finish`.

    `module` is the model itself, under whose plain names `state_dict` works; `load_state_dict` takes DDP's names too. A
    second backward before the optimizer's step averages its own gradients and adds them, as DDP's does. Whether a
    backward averages is decided by its forward, as in DDP: whether that ran inside `no_sync`.

    After an exception in backward, which the script may catch, the rank makes the calls that the others wait for. All
    ranks leave the step out: every .grad is None, and a warning names the rank. An exception in forward, or before
    backward has come to the model's output, leaves the step open: the rank's next backward takes its place.
    When the model has other parameters than before, or trains others, the buckets are laid again in the next forward.
    What is new then gets rank 0's values, and what a codec had kept for later steps is lost. Where not all ranks have
    changed the model, every rank raises UserError. Two of these modules in one backward, of which one rank leaves
    parameters unused or raises, need a process group each: their calls may come in another order there.
    A codec that keeps what it did not send needs the factor of the loss. It learns that from torch's
    GradScaler by itself. A script that multiplies its loss in another way sets `loss_scale` before backward, and calls
    `forget_step` where the optimizer leaves out a step whose gradients are finite.
    As with DDP, torch.autograd.grad() leaves .grad alone and averages nothing, and what a rank's own loss divides by
    is that rank's affair: the average of n ranks' mean losses is the global mean where their batches are as large.

    choice: what `parallelize` chose for strategy auto; None where the script named a strategy.
    sync_name: the sync's or strategy's name, with its compression as in "ring+bf16".
    """

    choice: Any = None
    sync_name = ""

    def __init__(self, module: nn.Module, sync: GradientSync, comm: GroupCommunicator, broadcast_buffers: bool = True):
        """`sync` is made over `comm`, and not attached yet. Raises UserError if the ranks' models differ."""
        super().__init__()
        self.broadcast_buffers = broadcast_buffers
        self._buffers_are_due = True  # no forward has come since the last average
        self.module = module
        sync.heeds_faults = True
        self._sync, self._comm = sync, comm
        self._layout: own_loop.GradientLayout | None = None  # what the sync is attached to
        self._quiet = contextlib.ExitStack()  # the sync's no_sync, where it is entered
        self.loss_scale = 1.0  # of a backward whose loss no GradScaler has multiplied
        self.require_backward_grad_sync = True  # DDP's word: whether the next forward's backward averages
        self._is_quiet = False  # the sync's no_sync is entered
        self._is_first = True  # no forward has come that trains
        self._thread = 0  # that of the last forward
        self._averages = True  # the last forward was outside no_sync
        self._only_adds = -1  # the backward that came to the output of a forward inside no_sync
        self._is_asked = False  # autograd is to call back at the end of this backward
        self._is_begun = False  # gradients have come or will come since the last finish
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._attached_to(sync.attach(module))
        if sync.own_is_lost:
            own_loop.watch_scalers()
        own_loop.LoadsBothForms(self)

    @property
    def ledger(self) -> TensorLedger:
        """What was sent; `totals()` by tensor."""
        return self._comm.ledger

    @property
    def communication(self) -> dict[str, int]:
        """The bytes that this rank has sent so far, by tensor or bucket; `ledger.totals()` has them by purpose."""
        return self._comm.ledger.bytes_sent()

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The model's own forward. Raises UserError if not all ranks have changed the model alike."""
        layout, averages = self._layout, self.require_backward_grad_sync
        if layout is None:
            return self.module(*inputs, **keywords)
        if not torch.is_grad_enabled():
            self._send_buffers()
            call = self._call if self._sync.sends_buffers and self.module is layout.model else self.module
            return call(*inputs, **keywords)
        if self._is_first:
            self._is_first = False
            slow = slow_halves(self.module) if self._comm.rank == 0 and self._comm.device.type == "cpu" else ""
            if slow:
                warnings.warn(slow, stacklevel=2)
        # A checkpointed module is called again inside backward, and the step continues there.
        if torch._C._current_graph_task_id() == -1:
            if self._is_begun:
                self._end_what_was_cut_short()
            self._is_asked = False
            self._send_buffers()
            if not layout.fits(self.module):
                self._lay_anew()
            self._be_quiet(not averages)
            self._averages, self._thread = averages, threading.get_ident()
        output = self._call(*inputs, **keywords)
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                leaf.register_hook(functools.partial(self._came_to_output, averages))
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Of a forward within this context backward only adds to the rank's own gradients."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def settle(self) -> None:
        """Give every rank rank 0's buffers, such as running statistics: for every rank, before evaluating or saving."""
        if self._is_begun:
            self._end_what_was_cut_short()
        self._sync.settle()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_` of all parameters; the norm is that of the whole gradient."""
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of all weights and buffers under the model's plain names, on every rank: every rank calls it.

        It begins with `settle`.
        """
        self.settle()
        return {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}

    def forget_step(self) -> None:
        """The optimizer leaves this step out, on every rank: drop what a codec has kept of it for the next one."""
        self._sync.forget_step()

    def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        """The model's own, under its plain names."""
        return self.module.state_dict(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name in IN_PLACE_OF:
            raise AttributeError(f"cos598d's DataParallel has no {name} as DDP has. {IN_PLACE_OF[name]}")
        return super().__getattr__(name)

    def detach(self) -> nn.Module:
        """Remove all hooks, free the buckets, and return the model, which is the caller's own again.

        A rank that still has a step to make then raises UserError there, instead of waiting for this one.
        """
        self._comm.leave(self._comm.calls)
        return self._let_go()

    def _let_go(self) -> nn.Module:
        self._be_quiet(False)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._sync.detach()
        self._call, self._layout = self.module.__call__, None
        self._is_begun = False
        return self.module

    def _send_buffers(self) -> None:
        """Before a forward, as DDP: nothing is sent for a model without buffers, nor where no average was made since.
        So an exception changes nothing: every rank sends them once for each average."""
        sync, layout = self._sync, self._layout
        if self.broadcast_buffers and self._buffers_are_due and not sync.sends_buffers:
            if layout is None or layout.fits(self.module):
                sync.settle()
            elif sync.replicas_equal:  # other ranks' models may be as before, and have those
                sync.send_buffers(layout.buffers)
        self._buffers_are_due = False

    @property
    def _trained(self) -> dict[str, nn.Parameter]:
        """The parameters that the sync is attached to, by name."""
        return self._layout.trained if self._layout else {}

    def _attached_to(self, call: nn.Module) -> None:
        """The sync is attached to the model as it is now, and `call` is what to call in its place."""
        for handle in self._handles:
            handle.remove()
        # Its method, since nn.Module would take `call` itself for a part of the model, and prefix its names.
        self._call, self._layout = call.__call__, own_loop.GradientLayout(self.module)
        self._handles = own_loop.watch_gradients(self._trained.values(), self._on_gradient)

    def _be_quiet(self, is_quiet: bool) -> None:
        if is_quiet and not self._is_quiet:
            self._quiet.enter_context(self._sync.no_sync())
        elif not is_quiet:
            self._quiet.close()
        self._is_quiet = is_quiet

    def _came_to_output(self, averages: bool, gradient: torch.Tensor | None = None) -> None:
        """Called while backward runs, with whether the output is of a forward whose backward averages."""
        if self._layout is None or self._is_asked:
            return
        if not averages:
            self._only_adds = torch._C._current_graph_task_id()
            self._be_quiet(True)
            return
        self._be_quiet(False)
        self._is_asked = True  # autograd is to call back once
        self._sync.loss_scale = own_loop.scale_of_this_backward(otherwise=self.loss_scale)
        own_loop.AtTheEnd(self._at_the_end, self._cut_short)
        # From here on this rank takes part in the step, whatever becomes of its backward.
        self._is_begun = self._is_begun or own_loop.will_get_gradients(self._trained.values())

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if not self._is_asked and self._averages and torch._C._current_graph_task_id() != self._only_adds:
            self._came_to_output(True)
        self._is_begun = self._is_begun or self._is_asked

    def _at_the_end(self) -> None:
        self._is_asked = False
        if self._is_begun:  # else it was torch.autograd.grad, which leaves .grad alone
            self._finish()

    def _cut_short(self) -> None:
        """An exception has ended this backward. On a device's thread of autograd the next forward sees to it."""
        self._is_asked = False
        if self._is_begun and threading.get_ident() == self._thread:
            try:
                self._end_what_was_cut_short()
            except UserError as error:  # it has no way to the script, which has the exception
                warnings.warn(str(error), stacklevel=2)

    def _finish(self, fault: str | None = None) -> None:
        """End the step on every rank: with averages, or without any gradient where a rank has a `fault`.

        Raises UserError, the same on every rank, where the script has to be changed.
        """
        self._is_begun = False
        self._buffers_are_due = True
        sync = self._sync
        sync.fault = fault
        try:
            if not sync.has_fault:  # a second pass through the model in one backward may have told it already
                sync.finish()
            if sync.has_fault is None and sync.replicas_equal:
                sync.agree_on_faults()
            has_fault = sync.has_fault or fault is not None
            faults = self._comm.exchange(sync.fault) if sync.has_fault else [sync.fault]
        finally:
            sync.fault = sync.has_fault = None
        if has_fault:
            self._leave_out(faults)
        elif sync.averages_weights:
            if sync.loss_scale != 1 and not sync.agree_on_finite(self._all_finite()):
                for parameter in self._trained.values():  # so every rank's GradScaler leaves the step out
                    if parameter.grad is not None:
                        parameter.grad.fill_(torch.inf)
        elif sync.own_is_lost and not self._all_finite():
            sync.forget_step()  # GradScaler leaves it out, as whoever looks at gradients before they are applied

    def _all_finite(self) -> bool:
        return all(p.grad is None or bool(p.grad.isfinite().all()) for p in self._trained.values())

    def _leave_out(self, faults: list[str | None]) -> None:
        """Drop the step, of which these are the ranks' faults in order of rank; raise or warn as `_finish` does."""
        self._sync.forget_step()
        for parameter in self._trained.values():
            parameter.grad = None
        which = functools.partial(own_loop.in_words, faults)
        if own_loop.CHANGED in faults and len(set(faults)) > 1:
            raise UserError(
                f"the ranks' models differ: {which(own_loop.CHANGED)} changed its model since the previous step, and "
                "not every rank did. Change the model on every rank between the same two steps."
            )
        missing = next((fault for fault in faults if fault not in (None, own_loop.CUT_SHORT, own_loop.CHANGED)), None)
        if missing is not None:
            raise UserError(f"{which(missing)}: {missing}")
        if own_loop.CUT_SHORT in faults:
            warnings.warn(
                f"{which(own_loop.CUT_SHORT)} left backward by an exception. Every rank skips this step, and all of "
                "its gradients are None. Continue with the next batch, with the same learning rate on every rank.",
                stacklevel=2,
            )

    def _end_what_was_cut_short(self) -> None:
        """Make the calls of a step that an exception has ended here, since the other ranks wait for them."""
        for parameter in self._trained.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # a call may need one to sum into
        self._finish(own_loop.CUT_SHORT)

    def _lay_anew(self) -> None:
        """Attach the sync to the model as it is now, on every rank, once all have told each other to do so.

        A rank whose model is as before makes the calls of a step now. So this one makes them too, without a gradient.
        """
        sync, comm, old = self._sync, self._comm, self._layout
        assert old is not None
        if not sync.replicas_equal:  # nothing is sent, and nobody waits for this rank
            self._attached_to(self.module)
            return
        # The calls write into memory that .grad may be a view of.
        added = [(p, p.grad.clone()) for p in old.trained.values() if p.grad is not None]
        for parameter, _ in added:
            parameter.grad = None
        self._finish(own_loop.CHANGED)
        check_models(comm, self.module)
        for parameter, gradient in added:
            parameter.grad = gradient
        self._average_what_is_trained_no_more()
        self._let_go()
        comm.equal_already = old.names_of_same(self.module)
        self._attached_to(sync.attach(self.module))

    def _average_what_is_trained_no_more(self) -> None:
        """What was added under `no_sync` to parameters that the sync will not see again: every rank gets the mean."""
        comm = self._comm
        trained = {p for p in self.module.parameters() if p.requires_grad}
        left = [(name, p) for name, p in self._trained.items() if p not in trained]
        has = comm.exchange([p.grad is not None for _, p in left])
        for (name, parameter), ranks_have in zip(left, zip(*has, strict=True), strict=True):
            if any(ranks_have):
                mean = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / comm.world_size
                comm.all_reduce(mean, name)
                parameter.grad = mean


def data_parallel(
    module: nn.Module,
    sync: str | type[GradientSync] = "bucketed",
    *,
    compress: str | None = None,
    bucket_mb: float = SyncOptions.bucket_mb,
    process_group: dist.ProcessGroup | None = None,
    find_unused_parameters: bool = True,
    gradient_as_bucket_view: bool = False,
    broadcast_buffers: bool = True,
    timeout_seconds: float = 300.0,
) -> DataParallel:
    """Wrap a model where `DistributedDataParallel(model)` stood, with one of our gradient syncs. Every rank calls it.

    sync: a registered name (`bucketed`, `sparse_rows`, `ring`, ...), FILE.py:CLASS, or a class with GradientSync's
    methods. compress: the compression of buckets ("bf16", "int8", "powersgd:4", ...), for syncs that have
    buckets. bucket_mb: their size in MiB. process_group: the ranks to average over; torch's default group if None.
    find_unused_parameters: whether a step may leave a trainable parameter without a gradient on some rank; finding
    out costs a small all-reduce a step, of 4 bytes where it may not. gradient_as_bucket_view: whether gradients are
    views of buckets, so that none is copied back, and the next step overwrites one that is kept (syncs with buckets).
    broadcast_buffers: whether rank 0's buffers are sent now, and before each forward that follows a synced one.
    timeout_seconds: how long a wait in shared memory may last; collectives have the process group's own timeout.

    Raises UsageError for a sync or codec that does not exist, does not fit, or averages weights instead of gradients,
    and where no process group is open; UserError where the ranks' models differ.
    """
    device = device_of(module.parameters(), "data_parallel")
    sync_class = _named(sync) if isinstance(sync, str) else sync
    name = sync if isinstance(sync, str) else sync.__name__
    if sync_class.averages_weights:
        raise UsageError(
            f"{name} averages weights after the optimizer's step, and data_parallel averages gradients. Choose "
            "another sync."
        )
    for word, value, default in (("compress", compress, None), ("bucket_mb", bucket_mb, SyncOptions.bucket_mb)):
        if value != default and word not in sync_class.uses:
            raise UsageError(f"{word} has no effect with {name}. Leave it out{or_choose(word)}.")
    if gradient_as_bucket_view and not {"copies_gradients", "bucket_view"}.intersection(sync_class.uses):
        raise UsageError(f"gradient_as_bucket_view has no effect with {name}, which has no buckets. Leave it out.")
    if compress is not None:
        get_codec(compress)
    comm = GroupCommunicator(process_group, device, timeout_seconds)
    views = {"bucket_view": gradient_as_bucket_view} if "bucket_view" in sync_class.uses else {}
    options = options_kind_of(sync_class)(
        bucket_mb=bucket_mb,
        compress=compress,
        **views,
        copies_gradients=not gradient_as_bucket_view,
        broadcast_buffers=broadcast_buffers,
    )
    check_flags(options)
    made = DataParallel(module, sync_class(comm, find_unused_parameters, options), comm, broadcast_buffers)
    made.sync_name = name_of(name, compress)
    return made


def name_of(sync: str, compress: str | None) -> str:
    """A sync's name with its compression, as in a bench: "ring+bf16"."""
    return f"{sync}+{compress}" if compress else sync


def _named(sync: str) -> type[GradientSync]:
    """The gradient sync of that name. Raises UsageError for others, with the names and what takes other strategies."""
    if sync in SYNCS or is_own(sync):
        with flag_called("sync", "--sync"):
            return get_sync(sync)
    error = unknown("sync", sync, [name for name in SYNCS if not get_sync(name).averages_weights])
    raise UsageError(
        f"{error} For auto, and for zero1 and others that shard, use cos598d.parallelize(model, make_optimizer, "
        "strategy)."
    )


def device_of(parameters: Iterable[nn.Parameter], caller: str) -> torch.device:
    """Where all of a model's parameters are.

    Raises UsageError, on behalf of the function `caller`, where they are not on one device, and where no process group
    is open.
    """
    if not dist.is_initialized():
        raise UsageError(
            f"{caller} needs an open process group. Call torch.distributed.init_process_group('gloo') before it."
        )
    devices = {p.device for p in parameters}
    if len(devices) != 1:
        raise UsageError(
            f"{caller} needs all parameters of a model on one device. Move them to one: they are on "
            f"{' and '.join(sorted(map(str, devices))) or 'none: it has no parameters'}."
        )
    return devices.pop()
