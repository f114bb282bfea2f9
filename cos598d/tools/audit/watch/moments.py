"""The moments of a training step: forward passes, backward passes, clips, steps, and new parameters.

Hooks of torch report the outermost forward passes and the steps. For the rest a few functions of torch are wrapped:
they do what they did, and report it. The reports go to one `Observer` at a time, as calls of its methods.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import data
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from cos598d.tools.audit.watch.data import has_values, tensors_in

_listener: Any = None  # an Observer
_is_installed = False
Begun = Callable[[torch.nn.Module], None]
Ended = Callable[[torch.nn.Module, list[torch.Tensor]], None]


def listen(listener: Any) -> None:
    """Report to `listener` from now on; None: to nobody."""
    global _listener, _is_installed  # noqa: PLW0603 - torch's functions are this process's, too
    _listener = listener
    if not _is_installed:
        _is_installed = True
        _install()


def _wrap(place: Any, name: str, around: Callable[..., Any]) -> Callable[..., Any]:
    original = getattr(place, name)

    @functools.wraps(original)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        if _listener is None:
            return original(*arguments, **options)
        return around(_listener, original, *arguments, **options)

    setattr(place, name, wrapped)
    return wrapped


def _install() -> None:
    _wrap(torch.Tensor, "register_hook", _register_hook)
    _wrap(torch.optim.Optimizer, "add_param_group", _add_param_group)
    _wrap(torch.autograd, "backward", _backward)
    utils = torch.nn.utils
    for name, how in (("clip_grad_norm_", "norm"), ("clip_grad_value_", "value")):
        wrapped = _wrap(utils.clip_grad, name, functools.partial(_clip, how))
        setattr(utils, name, wrapped)
    _wrap(GradScaler, "scale", _scaler_scale)
    _wrap(GradScaler, "step", _scaler_step)
    _wrap(torch, "save", _save)
    work: Any = dist.Work
    _wrap(work, "wait", _wait)
    _wrap(work, "get_future", _wait)
    _wrap(data.DataLoader, "__iter__", _loader)
    _wrap(DistributedSampler, "__iter__", _sampler)
    _wrap(_BaseDataLoaderIter, "__next__", _batch)
    register_optimizer_step_pre_hook(_step_begins)
    register_optimizer_step_post_hook(_step_ended)


def _step_begins(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if _listener is not None and has_values(next(tensors_in(optimizer.param_groups), None)):
        _listener.guard(_listener.open)()
        _listener.guard(_listener.steps.step_begins)(optimizer)


def _step_ended(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if _listener is not None and has_values(next(tensors_in(optimizer.param_groups), None)):
        _listener.guard(_listener.steps.step_ended)(optimizer)


def _register_hook(listener: Any, original: Any, tensor: torch.Tensor, hook: Any) -> Any:
    # Hooks are called in their order: the audit's has to see the gradient before the script's changes it.
    if isinstance(tensor, torch.Tensor) and tensor.is_leaf and tensor.requires_grad and has_values(tensor):
        listener.guard(listener.steps.hook)(tensor)
    return original(tensor, hook)


def _add_param_group(listener: Any, original: Any, optimizer: Any, group: Any) -> Any:
    result = original(optimizer, group)
    for tensor in filter(has_values, optimizer.param_groups[-1]["params"]):
        listener.guard(listener.steps.hook)(tensor)
    return result


def _backward(listener: Any, original: Any, *arguments: Any, **options: Any) -> Any:
    losses = arguments[0] if arguments else options.get("tensors")
    if not has_values(losses):
        return original(*arguments, **options)
    listener.backward_begins(losses, arguments[1] if len(arguments) > 1 else options.get("grad_tensors"))
    try:
        return original(*arguments, **options)
    finally:
        listener.backward_ended()


def _clip(how: str, listener: Any, original: Any, *arguments: Any, **options: Any) -> Any:
    result = original(*arguments, **options)
    name = "max_norm" if how == "norm" else "clip_value"
    limit = arguments[1] if len(arguments) > 1 else options.get(name, 0.0)
    if has_values(result):
        listener.guard(listener.clipped)(how, limit, result)
    return result


def _save(listener: Any, original: Any, *arguments: Any, **options: Any) -> Any:
    listener.guard(listener.saves)(arguments[1] if len(arguments) > 1 else options.get("f"))
    return original(*arguments, **options)


def _wait(listener: Any, original: Any, work: Any, *arguments: Any, **options: Any) -> Any:
    listener.guard(listener.calls.waited)(work)
    return original(work, *arguments, **options)


def _loader(listener: Any, original: Any, loader: Any) -> Any:
    listener.data.loader_began(loader)
    iterator = original(loader)
    listener.data.iterates(iterator, loader)
    return iterator


def _sampler(listener: Any, original: Any, sampler: Any) -> Any:
    listener.data.sampler_began(sampler)
    return original(sampler)


def _batch(listener: Any, original: Any, batches: Any) -> Any:
    batch = original(batches)
    listener.data.batch_came(batches)
    return batch


def _scaler_scale(listener: Any, original: Any, scaler: Any, outputs: Any) -> Any:
    result = original(scaler, outputs)
    if scaler.is_enabled():
        listener.guard(listener.steps.scaled)(scaler.get_scale())
    return result


def _scaler_step(listener: Any, original: Any, scaler: Any, optimizer: Any, *arguments: Any, **options: Any) -> Any:
    stepped = []
    handle = optimizer.register_step_pre_hook(lambda *_: stepped.append(True))
    try:
        return original(scaler, optimizer, *arguments, **options)
    finally:
        handle.remove()
        if not stepped:
            listener.guard(listener.steps.step_skipped)()


class Forwards:
    """Calls `begun` before and `ended` after each outermost call of a module with parameters."""

    def __init__(self, begun: Begun, ended: Ended):
        self._begun, self._ended = begun, ended
        self._depth, self._is_noted = 0, False
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module: torch.nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        if self._depth == 1:
            # A loss is a module, too: its inputs are no batch.
            first = next(module.parameters(), None)
            self._is_noted = first is not None and has_values(first)
            if self._is_noted:
                self._begun(module)

    def _after(self, module: torch.nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0 and self._is_noted:
            self._ended(module, [*tensors_in(inputs), *tensors_in(keywords)])
            self._is_noted = False
