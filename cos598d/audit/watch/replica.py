"""What one rank holds: the model that is trained, its weights and buffers as sketches, and its random state."""

import hashlib
import itertools
import weakref
from typing import Any

import torch

from cos598d.audit.sketch import Sketcher, to_text
from cos598d.audit.watch.steps import is_plain

_MOST = 5000  # tensors of a model that are compared
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "OptimizedModule")


class Replica:
    """The model that was trained last, and the leaves that its optimizers step. The tensors are kept alive, so that
    they can be compared when the script is over; of models before it they are not."""

    def __init__(self, sketch: Sketcher):
        self._sketch = sketch
        self._module: weakref.ref[torch.nn.Module] | None = None
        self._weights: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._ids: dict[int, str] = {}
        self.facts: dict[str, Any] = {}

    def known(self) -> dict[str, list[tuple[str, torch.Tensor]]]:
        """The tensors by kind, with their names."""
        return {"weight": [*self._weights.items()], "buffer": [*self._buffers.items()]}

    @property
    def names(self) -> dict[int, str]:
        """What the model's parameters are called, by their ids."""
        return self._ids

    def trained(self, module: torch.nn.Module) -> bool:
        """`module` is trained; whether it is another one than before."""
        if self._module is not None and self._module() is module:
            return False
        self._module = weakref.ref(module)
        self._weights = {_plain(name): each for name, each in itertools.islice(module.named_parameters(), _MOST)}
        self._buffers = {_plain(name): each for name, each in itertools.islice(module.named_buffers(), _MOST)}
        self._ids = {id(each): name for name, each in self._weights.items()}
        self.facts = describe(module)
        return True

    def weights(self) -> dict[str, str]:
        """A sketch of each weight that is whole on this rank."""
        return {name: to_text(self._sketch(each)) for name, each in self._weights.items() if is_plain(each)}

    def buffers(self) -> dict[str, str]:
        """A sketch of each buffer of floating-point numbers."""
        return {
            name: to_text(self._sketch(each))
            for name, each in self._buffers.items()
            if each.is_floating_point() and is_plain(each)
        }


def describe(module: torch.nn.Module) -> dict[str, Any]:
    """Facts of a module: its class, its wrappers' and what in it needs more than averaged gradients."""
    wrappers: list[str] = []
    inner: torch.nn.Module = module
    while type(inner).__name__ in _WRAPPERS:
        wrappers.append(type(inner).__name__)
        within = getattr(inner, "module", None) or getattr(inner, "_orig_mod", None)
        inner = within if isinstance(within, torch.nn.Module) else inner
        if len(wrappers) > len(_WRAPPERS):
            break
    parameters = [*module.parameters()]
    dropout = [float(each.p) for each in module.modules() if isinstance(each, torch.nn.modules.dropout._DropoutNd)]
    normed = [
        each
        for each in module.modules()
        if isinstance(each, torch.nn.modules.batchnorm._BatchNorm) and each.track_running_stats
    ]
    return {
        "class": type(inner).__name__,
        "wrappers": wrappers,
        "parameters": sum(each.numel() for each in parameters),
        "tensors": len(parameters),
        "dropout": max(dropout, default=0.0),
        "batch_norms": sum(not isinstance(each, torch.nn.SyncBatchNorm) for each in normed),
        "sharded": sum(not is_plain(each) for each in parameters),
        "dtype": str(parameters[0].dtype).removeprefix("torch.") if parameters else "",
        "device": parameters[0].device.type if parameters else "cpu",
    }


def random_state(device: torch.device) -> str:
    """A digest of the random state by which a module on this device drops out."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.random.get_rng_state()
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()


def _plain(name: str) -> str:
    for part in ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(part, "")
    return name.removeprefix("module.")
