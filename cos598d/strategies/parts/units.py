"""Parameters packed in a flat tensor that is split into one part per rank; and the layers of a model."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from cos598d.sync.buckets import Named

MOST_NODES = 200  # in a graph that is searched


@dataclass(frozen=True)
class ParameterSlice:
    """The elements of a parameter that are in one rank's part: [begin, end) of the part.

    They begin at element `offset` of the flattened parameter.
    """

    name: str
    parameter: nn.Parameter
    begin: int
    end: int
    offset: int


class Unit:
    """Parameters of one dtype, packed in a flat tensor of `elements`, and split into n parts as evenly as possible.

    Parts begin at multiples of `width` elements, so that no row is split.

    A unit's weights and its gradients have the same layout, in two tensors that need not always exist. `number` is its
    index among its model's units, the same on every rank. Its messages have the tags `gradients_tag` and `weights_tag`,
    which count from the model's `first_tag`. `layer` is the module whose forward is the only one to read the weights;
    None if several layers do, or if nobody needs it.
    """

    number, first_tag = 0, 1
    layer: nn.Module | None = None

    def __init__(self, name: str, parameters: Sequence[Named], ranks: int, width: int = 1):
        self.name, self.parameters = name, list(parameters)
        self.sizes = [p.numel() for _, p in self.parameters]
        self.elements = sum(self.sizes)
        self.dtype, self.device = self.parameters[0][1].dtype, self.parameters[0][1].device
        # As tensor_split: the first parts are longer by one row if n does not divide.
        rows = self.elements // width
        self.lengths = [width * (rows // ranks + (rank < rows % ranks)) for rank in range(ranks)]

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @property
    def gradients_tag(self) -> int:
        return self.first_tag + 2 * self.number

    @property
    def weights_tag(self) -> int:
        return self.first_tag + 2 * self.number + 1

    def empty(self, elements: int) -> torch.Tensor:
        """A flat tensor of this many elements, like this unit's."""
        return torch.empty(elements, dtype=self.dtype, device=self.device)

    def parts(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The ranks' parts of (elements,), as views."""
        return flat.split(self.lengths)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' places in (elements,), as views of their shapes."""
        return [part.view(p.shape) for part, (_, p) in zip(flat.split(self.sizes), self.parameters, strict=True)]

    def pieces(self, rank: int) -> Iterator[ParameterSlice]:
        """The slices in that rank's part, in order, without parameters that have nothing there."""
        first = sum(self.lengths[:rank])
        last = first + self.lengths[rank]
        begin = 0
        for (name, p), size in zip(self.parameters, self.sizes, strict=True):
            if max(begin, first) < min(begin + size, last):
                mine = max(begin, first)
                yield ParameterSlice(name, p, mine - first, min(begin + size, last) - first, mine - begin)
            begin += size


class ReplicatedUnit(Unit):
    """A parameter that is not sharded: every rank steps all of it."""

    def pieces(self, rank: int) -> Iterator[ParameterSlice]:
        ((name, p),) = self.parameters
        yield ParameterSlice(name, p, 0, self.elements, 0)


def longest_parts(units: Iterable[Unit]) -> dict[torch.dtype, int]:
    """The elements of the longest part of any unit, by dtype."""
    longest: dict[torch.dtype, int] = {}
    for unit in units:
        longest[unit.dtype] = max(longest.get(unit.dtype, 0), unit.lengths[0])
    return longest


def layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that are called as units, in order of registration: members of lists such as ModuleList, Sequential.

    A module that contains a list is taken apart: its other children, such as embeddings and heads, are layers too. A
    model without a list is taken whole. A container that is never called, such as a ParameterList, is no layer.
    """
    found: list[tuple[str, nn.Module]] = []

    def walk(name: str, module: nn.Module, is_member: bool) -> None:
        if _is_called(module) and (is_member or not any(map(_is_list, module.modules()))):
            found.append((name, module))
            return
        for child_name, child in module.named_children():
            walk(f"{name}.{child_name}" if name else child_name, child, is_member=_is_list(module))

    walk("", model, is_member=False)
    return found


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) or not _is_called(module)


def looked_up(model: nn.Module) -> set[nn.Parameter]:
    """The trainable weights of embeddings."""
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding))
    return {p for embedding in embeddings for p in embedding.parameters(recurse=False) if p.requires_grad}


def read_in_backward(outputs: Iterable[torch.Tensor], weights: set[nn.Parameter]) -> set[nn.Parameter]:
    """Those of `weights` whose values backward from `outputs` may read; an embedding's lookup does not read them.

    The result comes from the graph if that is small. For a large one, all weights are assumed to be read.
    """
    left = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen, read = set(left), set()
    while left:
        if len(seen) > MOST_NODES:
            return weights
        node = left.pop()
        for before, _ in node.next_functions:
            if before is None:
                continue
            variable = getattr(before, "variable", None)  # of a leaf
            if variable is not None and node.name() != "EmbeddingBackward0":
                read.add(variable)
            elif before not in seen:
                seen.add(before)
                left.append(before)
    return weights & read


def owners(model: nn.Module) -> dict[nn.Parameter, str]:
    """The name of the one layer that uses each trainable parameter; "" if it belongs to the model itself or to several
    layers (a tied weight)."""
    users: dict[nn.Parameter, set[str]] = {p: set() for p in model.parameters() if p.requires_grad}
    for name, module in layers(model):
        for p in module.parameters():
            if p in users:
                users[p].add(name)
    return {p: next(iter(names)) if len(names) == 1 else "" for p, names in users.items()}


def by_layer(units: Iterable[Unit]) -> dict[nn.Module | None, list[Unit]]:
    """The units of each layer, in their order. The key None, which always exists, has those of no layer."""
    found: dict[nn.Module | None, list[Unit]] = {None: []}
    for unit in units:
        found.setdefault(unit.layer, []).append(unit)
    return found
