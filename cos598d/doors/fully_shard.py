"""`fully_shard`: zero3 in the order of torch's: first the model, then any optimizer of its parameters."""

import copy
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from cos598d.comm.group import GroupCommunicator
from cos598d.doors.optimizer_shards import check_optimizers, cut_optimizer
from cos598d.doors.parallel import device_of
from cos598d.doors.sharded_parallel import ShardedParallel
from cos598d.doors.shards import ParallelOptimizer
from cos598d.errors import UsageError
from cos598d.strategies.zero3 import Zero3
from cos598d.sync.alike import check_models
from cos598d.sync.options import SyncOptions
from cos598d.terminal.fields import check_flags

COMPUTE_DTYPES = (None, torch.float32, torch.bfloat16)
_sharded: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # models and all their parts
_models: "weakref.WeakSet[FullySharded]" = weakref.WeakSet()
_last_hooks: "weakref.WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle]" = weakref.WeakKeyDictionary()


class FullySharded(ShardedParallel):
    """A model under zero3 whose optimizer is made after it, from its `parameters()`.

    In that optimizer's first step it becomes one of shards: its class is then also ParallelOptimizer, so that its
    `state_dict`, `zero_grad` and `add_param_group` are as `parallelize` has them. `optimizer` is it from then on.
    """

    is_waiting = True  # for the first step of an optimizer
    sync_name = "zero3"

    def __init__(self, module: nn.Module, comm: GroupCommunicator, options: SyncOptions, compute_dtype: Any):
        """`compute_dtype` is one of COMPUTE_DTYPES."""
        self._compute_dtype = compute_dtype
        none_yet = torch.optim.SGD(module.parameters(), lr=0.0)
        super().__init__(module, Zero3(comm, True, options), none_yet, comm, options.broadcast_buffers)
        self._parts = [*module.modules()]
        _sharded.update(self._parts)
        _models.add(self)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The model's own forward, under torch.autocast in the compute dtype, if there is one."""
        is_on = self._compute_dtype not in (None, torch.float32)
        with torch.autocast(self._comm.device.type, self._compute_dtype or torch.bfloat16, enabled=is_on):
            return super().forward(*inputs, **keywords)

    def detach(self) -> nn.Module:
        """As DataParallel's."""
        _sharded.difference_update(self._parts)
        _models.discard(self)
        return super().detach()

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Have this optimizer step the shards. Every rank calls it. Raises UsageError if it cannot step shards."""
        kind, whole = type(optimizer), copy.copy(optimizer)
        named = dict(self.module.named_parameters())
        check_optimizers(self._comm, whole, named)
        whole.state = {}  # type: ignore[assignment] # of the copy
        self.strategy.make_optimizer(cut_optimizer(whole, named))
        optimizer.__class__ = type(f"Sharded{kind.__name__}", (ParallelOptimizer, kind), {})
        assert isinstance(optimizer, ParallelOptimizer)
        optimizer.take_over(whole, self._step, self._cut_again)
        optimizer._patch_step_function()  # torch calls a script's hooks around the new class's step too
        self.optimizer, self.is_waiting = optimizer, False


def fully_shard(
    module: nn.Module,
    *,
    compute_dtype: torch.dtype | None = None,
    bucket_mb: float = SyncOptions.bucket_mb,
    process_group: dist.ProcessGroup | None = None,
    broadcast_buffers: bool = True,
    timeout_seconds: float = 300.0,
) -> FullySharded:
    """Shard a model's weights, gradients and the optimizer's state, as torch's `fully_shard`. Every rank calls it.

        model = cos598d.fully_shard(model, compute_dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)

    It takes the whole model once, and finds its layers itself. Use what it returns. compute_dtype: float32 or bfloat16,
    the dtype of torch.autocast in each forward; weights stay as they are, and gradients are summed in their dtype. The
    others are `parallelize`'s. The weights are whole in `full_state_dict()`, and between `settle()` and the next step.

    Raises UsageError for a part of a model that is sharded already, another compute_dtype, and without a process group;
    UserError, the same on every rank, where the ranks' models differ. The first step raises UsageError for an optimizer
    that does not treat every element by itself, and for a second one of the same model.
    """
    device = device_of(module.parameters(), "fully_shard")
    if any(part in _sharded for part in module.modules()):
        raise UsageError(
            "a part of this model is sharded already. Call fully_shard once, for the whole model: it finds the layers."
        )
    if compute_dtype not in COMPUTE_DTYPES:
        raise UsageError(f"compute_dtype {compute_dtype} is not known. Give torch.bfloat16, torch.float32 or None.")
    options = SyncOptions(bucket_mb=bucket_mb, copies_gradients=True, broadcast_buffers=broadcast_buffers)
    check_flags(options)
    comm = GroupCommunicator(process_group, device, timeout_seconds)
    check_models(comm, module)
    return FullySharded(module, comm, options, compute_dtype)


def _before_step(optimizer: torch.optim.Optimizer, inputs: Any, keywords: Any) -> None:
    """Before every optimizer's step: one of a sharded model's parameters gets a hook after the script's own.

    That hook steps the shards, and leaves no gradient for the step that follows it. So it does not matter which that
    is: a schedule that was made before the first step calls the optimizer's original step forever.
    """
    if not isinstance(optimizer, ParallelOptimizer):
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        model = next((each for each in _models if any(p is first for p in each.module.parameters())), None)
        if model is None:
            return
        if not model.is_waiting:
            raise UsageError(
                "another optimizer steps this model's shards already. Make one optimizer, with a group for each kind "
                "of parameters."
            )
        model.adopt(optimizer)
    elif type(optimizer) is ParallelOptimizer:
        return
    if optimizer in _last_hooks:
        _last_hooks[optimizer].remove()
    _last_hooks[optimizer] = optimizer.register_step_pre_hook(_step_parts)


def _step_parts(optimizer: Any, inputs: Any, keywords: Any) -> Any:
    """The last hook before a step: the shards make it. The step that follows is given the closure's result."""
    result = optimizer.step_parts(*inputs[1:], **keywords)
    return ((optimizer, lambda: result), {}) if inputs[1:] or keywords else None


register_optimizer_step_pre_hook(_before_step)
