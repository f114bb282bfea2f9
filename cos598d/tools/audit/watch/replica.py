"""What ranks must have alike: the trained model with its weights and buffers, its random state, and its optimizers."""

import hashlib
import itertools
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from cos598d.tools.audit.sketch import Sketcher, to_text
from cos598d.tools.audit.watch.shards import Shards, gradient_of, is_plain, plain_name

_MOST = 5000  # tensors of a model that are compared
_WRAPPERS = (
    *("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "OptimizedModule"),
    *("ShardedParallel", "FullySharded"),  # with DataParallel, those of this package
)
_GROUPS = 8  # of an optimizer that are noted


class TrainedModel:
    """The trained models, and their weights.

    The tensors are kept alive, so that they can be compared when the script is over. Tensors of a model that the script
    freed before it trained another one are not.
    """

    def __init__(self, sketch: Sketcher, shards: Shards):
        self._sketch, self._shards = sketch, shards
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._weights: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self.facts: dict[str, Any] = {}

    def known(self) -> dict[str, list[tuple[str, torch.Tensor]]]:
        """The tensors by kind, with their names."""
        return {"weight": [*self._weights.items()], "buffer": [*self._buffers.items()]}

    @property
    def names(self) -> dict[int, str]:
        """The names of the model's parameters, by id."""
        return {id(each): name for name, each in self._weights.items()}

    def trained(self, module: torch.nn.Module) -> bool:
        """`module` is trained. Returns whether it is a new one."""
        alive = [each for each in (reference() for reference in self._modules) if each is not None]
        if any(each is module for each in alive):
            return False
        if not alive:
            self._weights, self._buffers = {}, {}
        self._modules = [*map(weakref.ref, [*alive, module])]
        named = [(plain_name(name), each) for name, each in itertools.islice(module.named_parameters(), _MOST)]
        # What is gathered just now is not what is stepped.
        whole = [(name, self._shards.holders.get(name, each)) for name, each in named]
        self._add(self._weights, [*whole, *self._shards.holders.items()])
        self._add(self._buffers, [(plain_name(name), each) for name, each in module.named_buffers()])
        cut = sum(not self._shards.are_whole(each) for each in self._weights.values())
        self.facts = describe([*alive, module]) | {"sharded": cut, "cut_otherwise": self._shards.others}
        return True

    def _add(self, known: dict[str, torch.Tensor], named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Add tensors that are not known yet. If two models' weights have the same name, they get different ones."""
        there = {id(each) for each in known.values()}
        for name, each in itertools.islice(named, _MOST):
            if id(each) not in there:
                there.add(id(each))
                known[f"model {len(self._modules)}: {name}" if name in known else name] = each

    def fingerprint(self) -> str:
        """A digest that changes with the values of the whole weights."""
        sums = [each.detach().sum(dtype=torch.float64) for each in self._weights.values() if _is_dense(each)]
        return (
            hashlib.blake2b(torch.stack([each.cpu() for each in sums]).numpy().tobytes(), digest_size=8).hexdigest()
            if sums
            else ""
        )

    def have_gradients(self) -> bool:
        """Whether any weight has a gradient that is not 0."""
        gradients = map(gradient_of, self._weights.values())
        return any(each is not None and bool(each.to_dense().any()) for each in gradients)

    def sketches(self) -> dict[str, dict[str, str]]:
        """Sketches of what the rank holds now: whole weights, its parts of sharded ones, and floating-point buffers."""
        buffers = [(name, each) for name, each in self._buffers.items() if each.is_floating_point()]
        whole = {"weights": self._weights.items(), "buffers": buffers}
        found = {
            kind: {name: to_text(self._sketch(each)) for name, each in named if self._shards.are_whole(each)}
            for kind, named in whole.items()
        }
        return found | {"parts": {name: to_text(self._sketch(each)) for name, each in self._shards.parts()}}


def describe(trained: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """Facts about the trained models: the class, wrappers and sync (if one of our wrappers names it) of the first, and
    parts for which averaged gradients are not enough."""
    wrappers: list[str] = []
    inner: torch.nn.Module = trained[0]
    sync = ""
    while type(inner).__name__ in _WRAPPERS:
        wrappers.append(type(inner).__name__)
        sync = sync or str(getattr(inner, "sync_name", ""))
        within = getattr(inner, "module", None) or getattr(inner, "_orig_mod", None)
        inner = within if isinstance(within, torch.nn.Module) else inner
        if len(wrappers) > len(_WRAPPERS):
            break
    modules = {id(each): each for module in trained for each in module.modules()}.values()
    parameters = [*{id(each): each for module in trained for each in module.parameters()}.values()]
    dropout = [float(each.p) for each in modules if isinstance(each, torch.nn.modules.dropout._DropoutNd)]
    normed = [each for each in modules if isinstance(each, _BatchNorm) and each.track_running_stats]
    return {
        "class": type(inner).__name__,
        "wrappers": wrappers,
        "sync": sync,
        "parameters": sum(each.numel() for each in parameters),
        "tensors": len(parameters),
        "dropout": max(dropout, default=0.0),
        "batch_norms": sum(not isinstance(each, torch.nn.SyncBatchNorm) for each in normed),
        "dtype": str(parameters[0].dtype).removeprefix("torch.") if parameters else "",
        "device": parameters[0].device.type if parameters else "cpu",
    }


def _is_dense(tensor: torch.Tensor) -> bool:
    is_there = tensor.layout is torch.strided and not tensor.is_meta
    return is_there and tensor.is_floating_point() and is_plain(tensor)


def random_state(device: torch.device) -> str:
    """A digest of the random state that dropout uses on this device."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.random.get_rng_state()
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()


class SteppedOptimizers:
    """The optimizers that have stepped, in order. They are not kept alive."""

    def __init__(self) -> None:
        self._seen: list[weakref.ref[torch.optim.Optimizer]] = []

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""
        if not any(each() is optimizer for each in self._seen):
            self._seen.append(weakref.ref(optimizer))

    def settings(self) -> list[dict[str, Any]]:
        """The current settings of each."""
        return [settings_of(each) for each in (reference() for reference in self._seen) if each is not None]


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rates of an optimizer's first groups. Tensors are left out: to read one could block."""
    rates = [group.get("lr") for group in optimizer.param_groups[:_GROUPS]]
    return [float(each) for each in rates if isinstance(each, int | float) and math.isfinite(each)]


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's class, and the numbers in its first groups."""
    groups = []
    for group in optimizer.param_groups[:_GROUPS]:
        found = {}
        for name, value in group.items():
            is_number = isinstance(value, int | float) and math.isfinite(value)
            if name != "params" and (is_number or (isinstance(value, torch.Tensor) and value.numel() == 1)):
                found[name] = float(value)
        groups.append(found)
    return {"class": type(optimizer).__name__, "groups": groups}
