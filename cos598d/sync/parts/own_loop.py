"""What only a script with its own training loop does, and ours never does: see `cos598d.doors.parallel`."""

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from cos598d.terminal.words import ranks_in_words

# Reasons why a rank's gradients of a step do not count.
CUT_SHORT = "its backward ended in an exception"
CHANGED = "its model was given other parameters, or trains others, since the step before"


def in_words(faults: Sequence[str | None], fault: str) -> str:
    """The ranks with this one of the `faults`, which are in order of rank: "rank 1", "ranks 0, 2"."""
    return ranks_in_words([rank for rank, other in enumerate(faults) if other == fault])


class AtTheEnd:
    """A callback for the end of this backward. If an exception ends it, autograd drops its last reference to it."""

    def __init__(self, ended: Callable[[], None], cut_short: Callable[[], None]):
        self._ended, self._cut_short = ended, cut_short
        self._queued, self._is_over = 0, False
        self._queue()

    def __call__(self) -> None:
        if self._queued == 1:
            self._queue()  # after the callbacks that torch's DDP has queued in the meantime
            return
        self._is_over = True
        self._ended()

    def __del__(self) -> None:
        if not self._is_over:
            self._cut_short()

    def _queue(self) -> None:
        self._queued += 1
        torch.autograd.Variable._execution_engine.queue_callback(self)


def will_get_gradients(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether the running backward adds to the gradient of any of these; torch.autograd.grad does not."""
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        try:
            if torch._C._will_engine_execute_node(get_gradient_edge(parameter).node):
                return True
        except RuntimeError:  # torch.autograd.grad asks for exactly this gradient
            return False
    return False


def watch_gradients(
    parameters: Iterable[nn.Parameter], on_gradient: Callable[[nn.Parameter], None]
) -> list[RemovableHandle]:
    """Call the method `on_gradient` with each parameter whose gradient is complete, as long as its object lives.

    Python's garbage collector cannot see torch's references to these hooks. A hook that referred to the object would
    keep it, and its model, forever, even if a script drops the model without `detach`.
    """
    method = weakref.WeakMethod(on_gradient)

    def hook(parameter: nn.Parameter) -> None:
        if call := method():
            call(parameter)

    return [p.register_post_accumulate_grad_hook(hook) for p in parameters]


class GradientLayout:
    """The parameters and buffers of a model at one time, and which parameters it trains."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._marks = _marks(model)
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.buffers = list(model.buffers())
        # Kept, so that no other tensor gets the same id.
        self._tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}

    def fits(self, model: nn.Module) -> bool:
        """Whether the model still has these parameters and buffers, and trains the same ones."""
        return model is self.model and _marks(model) == self._marks

    def names_of_same(self, model: nn.Module) -> set[str]:
        """The names of the model's parameters and buffers that were also in this layout."""
        named = (*model.named_parameters(), *model.named_buffers())
        return {name for name, tensor in named if id(tensor) in self._tensors}


def _marks(model: nn.Module) -> list[tuple[int, bool]]:
    return [(id(p), p.requires_grad) for p in model.parameters()]


class _ScaledBackward:
    """An entry of `running` while autograd holds it: during a backward whose loss was multiplied by `scale`."""

    running: "weakref.WeakSet[_ScaledBackward]" = weakref.WeakSet()

    def __init__(self, scale: float):
        self.scale = scale
        self.running.add(self)
        torch.autograd.Variable._execution_engine.queue_callback(self)

    def __call__(self) -> None:
        """Nothing to do: only its lifetime matters."""


def scale_of_this_backward(otherwise: float) -> float:
    """The factor by which a GradScaler multiplied the running backward's loss; `otherwise` if none did.

    Only losses that were scaled after `watch_scalers` count.
    """
    return next((each.scale for each in _ScaledBackward.running), otherwise)


def watch_scalers() -> None:
    """Record from now on by what torch's GradScalers multiply a loss. May be called more than once."""
    _watch_scaler(torch.amp.GradScaler)


def _watch_scaler(scaler: type) -> None:
    subclasses: list[type] = scaler.__subclasses__()
    for subclass in subclasses:
        _watch_scaler(subclass)
    original = scaler.__dict__.get("scale")
    if original is None or hasattr(original, "is_watched"):
        return

    @functools.wraps(original)
    def scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if self.is_enabled():
            factor = self.get_scale()
            for leaf in pytree.tree_leaves(scaled):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _: _ScaledBackward(factor) and None)
        return scaled

    scale.is_watched = True  # type: ignore[attr-defined]
    scaler.scale = scale  # type: ignore[attr-defined]


class LoadsBothForms:
    """Lets a wrapper, whose model is `module`, load a state under the model's plain names or under DDP's.

    torch looks for the model's entries under `module.`. Missing and unexpected keys have the state's names.
    """

    def __init__(self, wrapper: nn.Module):
        wrapper._register_load_state_dict_pre_hook(self._before, with_module=True)
        wrapper.register_load_state_dict_post_hook(self._after)
        self._renamed: str | None = None  # the prefix of a state with plain names

    def _before(self, wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        plain = set(wrapper.state_dict())
        keys = [key[len(prefix) :] for key in state if key.startswith(prefix)]
        of_ddp = sum(key.removeprefix("module.") in plain for key in keys if key.startswith("module."))
        self._renamed = None if of_ddp > sum(key in plain for key in keys) else prefix
        if self._renamed is not None:
            # All are removed first: the model itself may have a part called "module".
            entries = {key: state.pop(prefix + key) for key in keys}
            state.update({f"{prefix}module.{key}": entry for key, entry in entries.items()})

    def _after(self, wrapper: nn.Module, incompatible: Any) -> None:
        prefix, self._renamed = self._renamed, None
        if prefix is None:
            return
        inner = f"{prefix}module."
        for names in (incompatible.missing_keys, incompatible.unexpected_keys):
            names[:] = [prefix + name[len(inner) :] if name.startswith(inner) else name for name in names]
