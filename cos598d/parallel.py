"""Our gradient syncs in anybody's script: as with torch's DDP, gradients are averaged when backward returns."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import GRADIENTS, STATE, Ledger, Row
from cos598d.comm.moments import Moment, Time
from cos598d.errors import UsageError
from cos598d.sync import get_sync, or_choose
from cos598d.sync.base import GradientSync, SyncOptions
from cos598d.sync.codecs import get_codec


@dataclass
class TensorTotals:
    """What has travelled for one tensor or bucket: calls, and bytes by the ledger's formulas."""

    calls: int = 0
    payload_bytes: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


class TensorLedger(Ledger):
    """A ledger that keeps sums by purpose and tensor and no rows, so that it does not grow with the steps."""

    def __init__(self):
        super().__init__()
        self._totals: dict[tuple[str, str], TensorTotals] = {}

    def enter(self, row: Row) -> None:
        total = self._totals.setdefault((row.purpose, row.tensor), TensorTotals())
        total.calls += 1
        total.payload_bytes += row.payload_bytes
        total.bytes_sent += row.bytes_sent
        total.bytes_received += row.bytes_received

    def enter_call(self, facts: dict[str, Any], time: Time, started: Moment, ended: Moment) -> None:
        self.enter(Row(**facts, seconds=None))  # seconds are not kept, and no host waits for them

    def totals(self, purpose: str = "gradients") -> dict[str, TensorTotals]:
        """What travelled so far, by tensor.

        `purpose`: "gradients", "state" (at the start), "agreement" or "buffers".
        """
        return {tensor: total for (its, tensor), total in self._totals.items() if its == purpose}


class GroupCommunicator(Communicator):
    """The collectives of a process group that somebody else opened (None: torch's default one)."""

    ledger: TensorLedger

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, seconds: float):
        # One backend, or one for each kind of device: "cpu:gloo,cuda:nccl".
        backends = dict(part.split(":") for part in dist.get_backend_config(group).split(",") if ":" in part)
        super().__init__(None, backends.get(device.type, dist.get_backend(group)), device, TensorLedger())
        self.rank, self.world_size, self.group = dist.get_rank(group), dist.get_world_size(group), group
        self._seconds = seconds
        self.sends_state = True  # else rank 0's parameters and buffers stay where they are

    def broadcast(self, tensor: torch.Tensor, name: str, *, root: int = 0, purpose: str = GRADIENTS) -> None:
        if purpose != STATE or self.sends_state:
            super().broadcast(tensor, name, root=root, purpose=purpose)

    @property
    def timeout_seconds(self) -> float:
        return self._seconds

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's `value`, in order of rank: its JSON's bytes, padded to the longest, by two all-gathers."""
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        lengths = self._gathered(torch.tensor([len(mine)], device=self.device))
        padded = torch.cat([mine, mine.new_zeros(int(max(lengths)) - len(mine))])
        parts = self._gathered(padded)
        return [json.loads(bytes(part[: int(n)].tolist())) for part, n in zip(parts, lengths, strict=True)]

    def _gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor, group=self.group)
        return parts


@dataclass
class _Held:
    """Hidden here from nn.Module, which would take `call` for a part of the model and prefix its names."""

    sync: GradientSync
    comm: GroupCommunicator
    call: nn.Module


class DataParallel(nn.Module):
    """A replica whose gradients are the average over all ranks when `backward()` returns.

    1. Made on every rank at once, it sends rank 0's parameters and buffers to all (the sync's `attach`).
    2. The output of `forward` has a hook: when backward reaches it, autograd is asked to call back at its end.
    3. The sync's own hooks see each gradient as it is computed; at backward's end the callback runs its `finish`.

    `module` is the model itself, under whose plain names `state_dict` and `load_state_dict` work. A second backward
    before the optimizer's step averages its own gradients and adds them, as DDP's does. After an exception in forward
    or backward the step that was cut short is brought to its end before the next one begins, so that the ranks' calls
    still match, and its gradients are dropped. When `requires_grad` has changed, on every rank alike, the buckets are
    laid anew before the next step, and what a codec had kept for later steps is lost. Two of these modules in one
    backward, of which one rank leaves parameters unused, need a process group each: their calls may come in another
    order there.
    As with DDP, torch.autograd.grad() leaves .grad alone and averages nothing, and what a rank's own loss divides by
    is that rank's affair: the average of n ranks' mean losses is the global mean where their batches are as large.
    """

    def __init__(self, module: nn.Module, sync: GradientSync, comm: GroupCommunicator):
        """`sync` is made over `comm`, and not attached yet. Raises UserError where the ranks' models differ."""
        super().__init__()
        self.module = module
        self._held = _Held(sync, comm, sync.attach(module))
        self._layout = self._trainable()
        self._sync_is_on = True
        self._is_asked = False  # autograd is to call back at the end of this backward
        self._is_begun = False  # a gradient has come since the last finish
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._watch()
        self._register_load_state_dict_pre_hook(_under_module)

    @property
    def ledger(self) -> TensorLedger:
        """What has travelled; `totals()` by tensor."""
        return self._held.comm.ledger

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The model's own forward."""
        if not torch.is_grad_enabled():
            return self.module(*inputs, **keywords)
        # A checkpointed module is called again inside backward, and the step goes on there.
        if torch._C._current_graph_task_id() == -1:
            if self._is_begun:
                self._end_what_was_cut_short()
            self._is_asked = False
            if self._sync_is_on and self._trainable() != self._layout:
                self._lay_anew()
        output = self._held.call(*inputs, **keywords)
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                leaf.register_hook(self._ask)
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context, which covers forward and backward, gradients only accumulate on each rank."""
        before, self._sync_is_on = self._sync_is_on, False
        try:
            with self._held.sync.no_sync():
                yield
        finally:
            self._sync_is_on = before

    def settle(self) -> None:
        """Give every rank rank 0's buffers, such as running statistics: for every rank, before evaluating or saving."""
        self._held.sync.settle()

    def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        """The model's own, under its plain names."""
        return self.module.state_dict(*arguments, **keywords)

    def detach(self) -> nn.Module:
        """Remove all hooks, free the buckets, and return the model, which is the caller's own again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._held.sync.detach()
        self._held.call = self.module
        return self.module

    def _watch(self) -> None:
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        self._handles = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in trainable]

    def _trainable(self) -> tuple[bool, ...]:
        return tuple(p.requires_grad for p in self.module.parameters())

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._sync_is_on:
            self._is_begun = True
            self._ask()

    def _ask(self, gradient: torch.Tensor | None = None) -> None:
        """Called while backward runs: have autograd call `_at_the_end` when it is over, once."""
        if self._sync_is_on and not self._is_asked:
            self._is_asked = True
            torch.autograd.Variable._execution_engine.queue_callback(self._at_the_end)

    def _at_the_end(self) -> None:
        self._is_asked = False
        if self._is_begun:  # else it was torch.autograd.grad, which leaves .grad alone
            self._finish()

    def _finish(self) -> None:
        self._is_begun = False
        self._held.sync.finish()

    def _end_what_was_cut_short(self) -> None:
        """Make the calls of a step that an exception has ended here, since the other ranks wait for them.

        Its gradients are dropped: what is in .grad now may be half of a sum.
        """
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        for parameter in trainable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # zero_grad took it, and a call may need one to sum into
        self._finish()
        for parameter in trainable:
            parameter.grad = None

    def _lay_anew(self) -> None:
        sync = self._held.sync
        self.detach()
        self._held.comm.sends_state = False  # the replicas are equal already
        self._held.call = sync.attach(self.module)
        self._layout = self._trainable()
        self._watch()


def data_parallel(
    module: nn.Module,
    sync: str | type[GradientSync] = "bucketed",
    *,
    compress: str | None = None,
    bucket_mb: float = SyncOptions.bucket_mb,
    process_group: dist.ProcessGroup | None = None,
    find_unused_parameters: bool = True,
    timeout_seconds: float = 300.0,
) -> DataParallel:
    """Wrap a model where `DistributedDataParallel(model)` stood, with one of our gradient syncs. Every rank calls it.

    sync: a registered name (`bucketed`, `sparse_rows`, `ring`, ...), FILE.py:CLASS, or a class with GradientSync's
    methods. compress: the codec in which buckets travel ("bf16", "int8", "powersgd:4", ...), for syncs that have
    buckets. bucket_mb: their size in MiB. process_group: the ranks to average over; torch's default group if None.
    find_unused_parameters: whether a step may leave a trainable parameter without a gradient on some rank; finding
    out costs a small all-reduce a step. timeout_seconds: how long a wait in shared memory may last; collectives have
    the process group's own timeout.

    Raises UsageError for a sync or codec that does not exist, does not fit, or averages weights instead of gradients,
    and where no process group is open; UserError where the ranks' models differ.
    """
    if not dist.is_initialized():
        raise UsageError(
            "data_parallel needs an open process group: call torch.distributed.init_process_group('gloo') before it."
        )
    sync_class = get_sync(sync) if isinstance(sync, str) else sync
    name = sync if isinstance(sync, str) else sync.__name__
    if sync_class.averages_weights:
        raise UsageError(f"{name} averages weights after the optimizer's step, and data_parallel averages gradients.")
    for word, value, default in (("compress", compress, None), ("bucket_mb", bucket_mb, SyncOptions.bucket_mb)):
        if value != default and word not in sync_class.uses:
            raise UsageError(f"{word} means nothing to {name}: leave it out{or_choose(word)}.")
    if compress is not None:
        get_codec(compress)
    devices = {p.device for p in module.parameters()}
    if len(devices) != 1:
        raise UsageError(
            f"data_parallel takes a model whose parameters are all on one device, and this one's are on "
            f"{' and '.join(sorted(map(str, devices))) or 'none: it has no parameters'}."
        )
    comm = GroupCommunicator(process_group, devices.pop(), timeout_seconds)
    made = sync_class(comm, find_unused_parameters, SyncOptions(bucket_mb=bucket_mb, compress=compress))
    return DataParallel(module, made, comm)


def _under_module(state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let a state under plain names be loaded: torch looks for the model's entries under `module.`."""
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}module.{key[len(prefix) :]}"] = state.pop(key)
