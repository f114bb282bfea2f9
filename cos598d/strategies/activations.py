"""What forward and backward hold next to weights and gradients, found by a pass that computes nothing.

torch's fake tensors have shapes, dtypes and a device, and no values: every operation only makes the next shapes. So the
memory of a pass that would not fit can be known, in a second or two.
"""

import copy
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cos598d.strategies.precision import computing_in


class Moment(NamedTuple):
    """Until the next parameter's gradient is there: the share of gradients that exist then, and the other bytes."""

    share: float
    activations: int


def activations_of_pass(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], precision: str, device: torch.device
) -> list[Moment]:
    """What a pass of `model` holds that is neither a parameter nor a gradient of one, each time that a gradient comes.

    Of the model only shapes are asked, so `without_values` will do; `inputs` are a micro-batch's. Counted is
    what forward saves for backward, casts of weights, and what an operation makes for the next one. Nothing is returned
    without inputs, on a GPU, and where forward depends on numbers that are not known.
    """
    if not inputs or device.type != "cpu":
        return []
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def without_values(tensor: torch.Tensor) -> torch.Tensor:
        with fake:
            return torch.empty_like(tensor, device=device)

    memo: dict[int, torch.Tensor] = {
        id(p): nn.Parameter(without_values(p), requires_grad=p.requires_grad) for p in model.parameters()
    }
    memo |= {id(buffer): without_values(buffer) for buffer in model.buffers()}
    held = _Held(memo.values())
    trainable = [p for p in memo.values() if p.requires_grad]
    for p in trainable:
        p.register_hook(held.gradient_comes)
    # Integers keep their values: BERT's forward asks its mask how many tokens there are, and RoBERTa's its tokens.
    given = {name: without_values(x) if x.is_floating_point() else x for name, x in inputs.items()}
    module = computing_in(precision, device, copy.deepcopy(model, memo))
    try:
        with held:
            module(**given)[0].backward()
    except RuntimeError:  # torch's, that a fake tensor has no values
        return []
    whole = sum(p.nbytes for p in trainable)
    return [Moment(arrived / whole, activations) for arrived, activations in held.moments]


class _Held(TorchDispatchMode):
    """Counts the bytes of all tensors that operations have made and that still exist."""

    def __init__(self, known: Iterable[torch.Tensor]):
        super().__init__()
        self.moments: list[tuple[int, int]] = []  # bytes of gradients, and the most of other tensors since the last
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._sizes: dict[int, tuple[int, int]] = {}  # by storage: when it was made, in this moment, and its bytes
        self._now, self._gradients = 0, 0
        self._levels = [0]  # after each operation of this moment

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        self._levels.append(self._now)
        return made

    def gradient_comes(self, gradient: torch.Tensor) -> None:
        """A parameter's is whole: it is no activation, and a moment ends."""
        size, key = gradient.nbytes, gradient.untyped_storage()._cdata
        began, _ = self._sizes.pop(key, (len(self._levels), 0))
        self._known.add(key)
        others = [level - size if place >= began else level for place, level in enumerate(self._levels)]
        self._gradients += size
        self.moments.append((self._gradients, max(others)))
        self._sizes = {key: (0, bytes_) for key, (_, bytes_) in self._sizes.items()}
        self._now = others[-1]
        self._levels = [self._now]

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known and key not in self._sizes:
            self._sizes[key] = len(self._levels), storage.nbytes()
            self._now += storage.nbytes()
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._known.discard(key)
        self._now -= self._sizes.pop(key, (0, 0))[1]
