"""Shards: which part of every gradient this rank keeps where FSDP, in either of its forms, cuts the weights over ranks.

FSDP computes gradients of weights that it has gathered, and lets the optimizer step this rank's part of their average.
So a local gradient is sketched part by part, as it will be cut, and what is applied is compared with the sketches of
its own part.

A script can also reduce-scatter all gradients in a row by hand, so that each rank steps a tensor of its own (ZeRO).
That can be judged if the row is the model's gradients one after another. Its pieces, without the factor by which they
were scaled before, are then this rank's gradients as they are cut.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from cos598d.tools.audit.sketch import Sketcher

NAME = "all gradients in a row"
_EXACT = 1e-3  # of a gradient: what may differ
_SMALL = 1e-7  # of the largest: rounding


class TensorCut(NamedTuple):
    """A tensor in `pieces` parts along `dim`, as `torch.chunk` makes them; this rank keeps the one at `place`."""

    pieces: int
    place: int
    dim: int = 0

    def parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """All of them; the last ones may be empty."""
        found = [*whole.chunk(self.pieces, self.dim)]
        return found + [whole.new_empty(0)] * (self.pieces - len(found))


class Shards:
    """The tensors that hold this rank's parts, their names, and the gathered leaves that they replace in the step."""

    def __init__(self) -> None:
        self.others = 0  # tensors that are cut in another way: tensor parallelism
        self.names: dict[int, str] = {}  # of what holds a part, by its id
        self._cuts: dict[int, TensorCut] = {}
        self._holders: dict[str, torch.Tensor] = {}
        self._by_module: dict[int, dict[str, torch.Tensor]] = {}
        self._homes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # gathered leaf and what holds its part
        self._views: dict[int, torch.Tensor] = {}  # parameters that are views of a flat one's part
        self._looked_at: list[Any] = []  # kept, so that no two have the same id

    def look(self, module: torch.nn.Module) -> bool:
        """Note which tensors are cut in a model that is about to be trained. Returns whether this is the first look.

        Call it before the forward pass, when nothing is gathered yet.
        """
        if any(each is module for each in self._looked_at):
            return False
        self._looked_at.append(module)
        units: list[str] = []  # of FSDP's second form, by their paths
        for path, child in module.named_modules():
            if any(kind.__name__ == "FSDPModule" for kind in type(child).__mro__):
                units.append(f"{path}." if path else "")
            of_fsdp = f"{path}.".startswith(tuple(units))
            for attribute, parameter in child._parameters.items():
                cut = _cut_of(parameter) if of_fsdp else None
                self.others += parameter is not None and hasattr(parameter, "placements") and cut is None
                if cut is not None and parameter is not None:
                    self._add(plain_name(f"{path}.{attribute}"), parameter, cut)
                    self._by_module.setdefault(id(child), {})[attribute] = parameter
            handle = getattr(child, "_handle", None)
            flat = getattr(handle, "flat_param", None)
            if handle is not None and isinstance(flat, torch.Tensor):
                cut = TensorCut(handle.world_size, handle.rank) if handle.uses_sharded_strategy else TensorCut(1, 0)
                self._add(plain_name(f"{path}.{FLAT}"), flat, cut)
                self._views |= {id(each): each for each in getattr(flat, "_params", None) or ()}
        return True

    def _add(self, name: str, holder: torch.Tensor, cut: TensorCut) -> None:
        self._holders[name], self._cuts[id(holder)], self.names[id(holder)] = holder, cut, name

    @property
    def are_there(self) -> bool:
        """Whether anything is cut."""
        return bool(self._holders)

    @property
    def holders(self) -> dict[str, torch.Tensor]:
        """The tensors that hold this rank's parts, by name."""
        return self._holders

    @property
    def flats(self) -> list[torch.Tensor]:
        """The flat parameters: the optimizer steps them, or views of them."""
        return [each for name, each in self._holders.items() if name.endswith(FLAT)]

    def gathered(self, module: torch.nn.Module) -> Iterator[torch.Tensor]:
        """The leaves that are newly gathered in a module."""
        for attribute, holder in self._by_module.get(id(module), {}).items():
            leaf = module._parameters.get(attribute)
            is_leaf = leaf is not None and leaf is not holder and leaf.is_leaf and not hasattr(leaf, "placements")
            if leaf is not None and is_leaf and id(leaf) not in self._homes:
                self._homes[id(leaf)] = leaf, holder
                yield leaf

    def home(self, leaf: torch.Tensor) -> torch.Tensor:
        """The holder of this rank's part of a gathered leaf; any other tensor itself."""
        return self._homes.get(id(leaf), (leaf, leaf))[1]

    def cut(self, holder: torch.Tensor) -> TensorCut | None:
        """How the tensor of which `holder` has a part is sharded; None if it is not."""
        return self._cuts.get(id(holder))

    def are_whole(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is neither a part of one nor a view of such a part."""
        return is_plain(tensor) and id(tensor) not in self._cuts and id(tensor) not in self._views

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's part of each sharded weight, named with its place. Equal names mean equal parts."""
        for name, holder in self._holders.items():
            cut = self._cuts[id(holder)]
            part = getattr(holder, "_local_shard", None)
            yield f"{name}, part {cut.place + 1} of {cut.pieces}", local(holder) if part is None else part


FLAT = "_flat_param"


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's type is not that of a part."""
    return not hasattr(tensor, "placements") and type(tensor).__name__ != "FlatParameter"


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor, as a plain one. Nothing is sent."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def is_in_shards(parameter: torch.Tensor) -> bool:
    """Whether its .grad represents parts on all ranks, and has no memory (cos598d.parallelize)."""
    return type(parameter.grad).__name__ == "ShardedGradient"


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """This rank's gradient of a parameter, or of its part; None if none can be read."""
    return None if parameter.grad is None or is_in_shards(parameter) else local(parameter.grad)


def plain_name(name: str) -> str:
    """A parameter's name without its wrappers' names."""
    for part in ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(part, "")
    return name.removeprefix(".").removeprefix("module.")


def _cut_of(parameter: torch.Tensor | None) -> TensorCut | None:
    """How a distributed tensor is cut: along exactly one dimension of its mesh; otherwise None."""
    placements = getattr(parameter, "placements", None)
    if parameter is None or placements is None:
        return None
    cuts = [place for place, each in enumerate(placements) if not each.is_replicate()]
    if len(cuts) != 1 or type(placements[cuts[0]]).__name__ != "Shard":
        return None
    distributed: Any = parameter
    mesh = distributed.device_mesh
    return TensorCut(mesh.size(cuts[0]), mesh.get_local_rank(cuts[0]), placements[cuts[0]].dim)


def pieces_of(
    tensors: Sequence[torch.Tensor],
    ranks: int,
    weights: Sequence[tuple[str, torch.Tensor]],
    local: Mapping[str, Sequence[np.ndarray | None]],
    sketch: Sketcher,
) -> np.ndarray | None:
    """Sketches (ranks, SIZE) of the local gradients, cut as `tensors`, which a rank gives to a reduce-scatter.

    `weights` are the model's, in order. `local` are the sketches of their gradients by micro-batch. None unless the
    tensors are all of these gradients in that order or the reverse, times one factor, plus zeros.
    """
    if any(each.layout is not torch.strided for each in tensors) or len(tensors) not in (1, ranks):
        return None
    with torch.no_grad():
        row = torch.cat([each.detach().reshape(-1) for each in tensors])
        order = [(name, weight.numel()) for name, weight in weights if name in local]
        size = sum(numel for _, numel in order)
        if not size or len(row) % ranks or not size <= len(row) < size + ranks * len(order):
            return None
        for names in (order, order[::-1]):
            factor = _factor(row, names, local, sketch)
            if factor:
                return np.stack([sketch(each) for each in row.chunk(ranks)]) / factor
    return None


class SteppedPart:
    """This rank's part of all weights in a row, which an optimizer is about to step: `tensor`, the part at `place`."""

    def __init__(self, tensor: torch.Tensor, place: int):
        self._tensor, self._place, self._before = tensor, place, tensor.detach().clone()

    def is_old_in(self, weights: Sequence[torch.Tensor]) -> bool:
        """Whether the model's `weights`, in either order, contain the part from before the step, not the new one."""
        new = self._tensor.detach()
        if any(each.layout is not torch.strided for each in weights):
            return False
        for order in (weights, weights[::-1]):
            row = torch.cat([each.detach().reshape(-1) for each in order])
            there = row[self._place * new.numel() :][: new.numel()]
            here, before = (each.reshape(-1)[: len(there)].to(there.dtype) for each in (new, self._before))
            if len(there) and torch.equal(there, before) and not torch.equal(there, here):
                return True
        return False


def _factor(
    row: torch.Tensor,
    order: Sequence[tuple[str, int]],
    local: Mapping[str, Sequence[np.ndarray | None]],
    sketch: Sketcher,
) -> float:
    """The factor of the gradients in the row; 0.0 if the row is not made of them."""
    found, place = [], 0
    sums = {name: np.sum([each for each in local[name] if each is not None], axis=0) for name, _ in order}
    largest = max(float(np.linalg.norm(each)) for each in sums.values())
    for name, numel in order:
        there, own = sketch(row[place : place + numel]), sums[name]
        place += numel
        if np.linalg.norm(own) <= _SMALL * largest:
            continue
        factor = float(there @ own / (own @ own))
        if not abs(factor) or np.linalg.norm(there - factor * own) > _EXACT * np.linalg.norm(there):
            return 0.0
        found.append(factor)
    is_one = bool(found) and max(found) - min(found) <= _EXACT * max(map(abs, found))
    return found[0] if is_one and not row[place:].any() else 0.0
