"""Shards: which part of every gradient this rank keeps where `fully_shard` (FSDP2) cuts the weights over the ranks.

FSDP computes gradients of weights that it has gathered, and lets the optimizer step this rank's part of their average.
So a local gradient is sketched part by part, as it will be cut. What is applied is compared with the sketches of its
own part. The first form of FSDP, and ZeRO by hand, are not judged.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


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
        self._looked_at: list[Any] = []  # kept, so that no two have the same id

    def look(self, module: torch.nn.Module) -> bool:
        """Note which tensors are cut in a model that is about to be trained. Returns whether this is the first look.

        Call it before the forward pass, when nothing is gathered yet.
        """
        if any(each is module for each in self._looked_at):
            return False
        self._looked_at.append(module)
        units: list[str] = []  # of fully_shard, by their paths
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
        """Whether a tensor is no part of another one."""
        return is_plain(tensor) and id(tensor) not in self._cuts

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's part of each sharded weight, named with its place. Equal names mean equal parts."""
        for name, holder in self._holders.items():
            cut = self._cuts[id(holder)]
            yield f"{name}, part {cut.place + 1} of {cut.pieces}", local(holder)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's type is not that of a part."""
    return not hasattr(tensor, "placements") and type(tensor).__name__ != "FlatParameter"


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
