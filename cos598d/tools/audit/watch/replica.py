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

_MOST = 5000  # tensors of a model that are compared
_GROUPS = 8  # of an optimizer that are noted


class TrainedModel:
    """The trained models, and their weights.

    The tensors are kept alive, so that they can be compared when the script is over. Tensors of a model that the script
    freed before it trained another one are not.
    """

    def __init__(self, sketch: Sketcher):
        self._sketch = sketch
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
        self._add(self._weights, named)
        self._add(self._buffers, [(plain_name(name), each) for name, each in module.named_buffers()])
        self.facts = describe([*alive, module])
        return True

    def _add(self, known: dict[str, torch.Tensor], named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Add tensors that are not known yet. If two models' weights have the same name, they get different ones."""
        there = {id(each) for each in known.values()}
        for name, each in itertools.islice(named, _MOST):
            if id(each) not in there:
                there.add(id(each))
                known[f"model {len(self._modules)}: {name}" if name in known else name] = each

    def sketches(self) -> dict[str, dict[str, str]]:
        """Sketches of what the rank holds now: its whole weights, and its floating-point buffers."""
        buffers = [(name, each) for name, each in self._buffers.items() if each.is_floating_point()]
        return {
            kind: {name: to_text(self._sketch(each)) for name, each in named if is_plain(each)}
            for kind, named in (("weights", self._weights.items()), ("buffers", buffers))
        }


def describe(trained: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """Facts about the trained models: how their weights are cut, and parts for which averaged gradients are not
    enough."""
    modules = {id(each): each for module in trained for each in module.modules()}.values()
    parameters = [*{id(each): each for module in trained for each in module.parameters()}.values()]
    dropout = [float(each.p) for each in modules if isinstance(each, torch.nn.modules.dropout._DropoutNd)]
    normed = [each for each in modules if isinstance(each, _BatchNorm) and each.track_running_stats]
    kinds = {kind.__name__ for each in modules for kind in type(each).__mro__}
    placed = [each for each in parameters if hasattr(each, "placements")]
    are_views = "FullyShardedDataParallel" in kinds  # of a part of all weights in a row
    return {
        "sharded": sum(are_views or not is_plain(each) for each in parameters),
        # By more than data parallelism: ranks of tensor parallelism share their batches.
        "cut_otherwise": sum("FSDPModule" not in kinds or _cuts(each) > 1 for each in placed),
        "dropout": max(dropout, default=0.0),
        "batch_norms": sum(not isinstance(each, torch.nn.SyncBatchNorm) for each in normed),
        "dtype": str(parameters[0].dtype).removeprefix("torch.") if parameters else "",
    }


def _cuts(parameter: Any) -> int:
    return sum(not each.is_replicate() for each in parameter.placements)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is a whole tensor with memory: no part of one that FSDP or tensor parallelism has cut."""
    is_cut = hasattr(tensor, "placements") or hasattr(tensor, "_is_flat_param")
    return not is_cut and (tensor.layout != torch.strided or tensor.untyped_storage().nbytes() >= tensor.nbytes)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor, as a plain one. Nothing is sent."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def is_in_shards(parameter: torch.Tensor) -> bool:
    """Whether its .grad represents parts on all ranks, and has no memory (cos598d.parallelize)."""
    return type(parameter.grad).__name__ == "Unread"


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """This rank's gradient of a parameter, or of its part; None if none can be read."""
    return None if parameter.grad is None or is_in_shards(parameter) else local(parameter.grad)


def plain_name(name: str) -> str:
    """A parameter's name without its wrappers' names."""
    for part in ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(part, "")
    return name.removeprefix(".").removeprefix("module.")


def random_state(device: torch.device) -> str:
    """A digest of the random state that dropout uses on this device."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.random.get_rng_state()
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()


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
