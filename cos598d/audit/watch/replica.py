"""What one rank holds: the model that is trained, its weights and buffers as sketches, and its random state."""

import hashlib
import itertools
import weakref
from typing import Any

import torch

from cos598d.audit.sketch import Sketcher, to_text
from cos598d.audit.watch.shards import Shards, plain_name

_MOST = 5000  # tensors of a model that are compared
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "OptimizedModule")


class Replica:
    """The model that was trained last, and the leaves that its optimizers step. The tensors are kept alive, so that
    they can be compared when the script is over; of models before it they are not."""

    def __init__(self, sketch: Sketcher, shards: Shards):
        self._sketch, self._shards = sketch, shards
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
        named = [(plain_name(name), each) for name, each in itertools.islice(module.named_parameters(), _MOST)]
        # What is gathered just now is not what is stepped.
        self._weights = {name: self._shards.holders.get(name, each) for name, each in named} | self._shards.holders
        self._buffers = {plain_name(name): each for name, each in itertools.islice(module.named_buffers(), _MOST)}
        self._ids = {id(each): name for name, each in self._weights.items()}
        cut = sum(not self._shards.are_whole(each) for each in self._weights.values())
        self.facts = describe(module) | {"sharded": cut, "cut_otherwise": self._shards.others}
        return True

    def sketches(self) -> dict[str, dict[str, str]]:
        """What the rank holds now."""
        return {"weights": self.weights(), "parts": self.parts(), "buffers": self.buffers()}

    def weights(self) -> dict[str, str]:
        """A sketch of each weight that is whole on this rank."""
        whole = {name: each for name, each in self._weights.items() if self._shards.are_whole(each)}
        return {name: to_text(self._sketch(each)) for name, each in whole.items()}

    def parts(self) -> dict[str, str]:
        """A sketch of this rank's part of each weight that is cut, by name and place."""
        return {name: to_text(self._sketch(each)) for name, each in self._shards.parts()}

    def buffers(self) -> dict[str, str]:
        """A sketch of each buffer of floating-point numbers."""
        return {
            name: to_text(self._sketch(each))
            for name, each in self._buffers.items()
            if each.is_floating_point() and self._shards.are_whole(each)
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
        "dtype": str(parameters[0].dtype).removeprefix("torch.") if parameters else "",
        "device": parameters[0].device.type if parameters else "cpu",
    }


def random_state(device: torch.device) -> str:
    """A digest of the random state by which a module on this device drops out."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.random.get_rng_state()
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()
