"""Local training whose averages are sent in fragments while training continues: streaming DiLoCo."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from cos598d.sync.codecs import Codec, End, make_codec
from cos598d.sync.local_sgd import LocalSGD, LocalSGDOptions
from cos598d.sync.options import SYNC_GROUP, Compression, Options
from cos598d.terminal.fields import flag


@dataclass(frozen=True)
class DiLoCoOptions(LocalSGDOptions, Compression):
    """The options of diloco.

    fragments: the number of parts that weights are averaged in, one after the other.
    outer_learning_rate, outer_momentum: of the outer optimizer.
    """

    fragments: int = flag(
        16, "parts of the weights that diloco averages one after the other", group=SYNC_GROUP, least=1, below=10_000
    )
    outer_learning_rate: float = flag(0.7, "outer optimizer's learning rate, for diloco", group=SYNC_GROUP, above=0)
    outer_momentum: float = flag(
        0.9, "outer optimizer's Nesterov momentum, for diloco", group=SYNC_GROUP, least=0, below=1
    )


class DiLoCo(LocalSGD):
    """Local steps, and an outer step along their averaged movement, fragment by fragment (Douillard et al. 2023,
    "DiLoCo", and 2025, "Streaming DiLoCo with overlapping communication", arXiv 2501.18512).

    The weights are split into F fragments of equal size (`--fragments F`). The ranks hold a second copy of the
    weights, the agreed ones, which is the same on all, and a momentum.
    1. In every step each rank steps by the gradient of its own share of the global batch, as in `local_sgd`.
    2. After every H-th step (`--sync_every H`) the next fragment is sent: each rank takes the difference between its
       weights and the agreed ones, and an all-reduce averages that while training continues.
    3. H steps later, before the next fragment is sent, it has arrived. The agreed weights make a step of SGD along the
       average, with Nesterov's momentum (`--outer_learning_rate`, `--outer_momentum`). Each rank adds to its own
       weights the difference between the new agreed weights and its own weights of point 2. So it keeps what it has
       learned since.
    4. Before the model is evaluated or saved, all ranks average their weights, as in `local_sgd`, and that becomes the
       agreed copy. A fragment that is being sent is dropped, because the average replaces it.

    The paper mixes the arriving weights with a rank's own, half and half; point 3 adds instead. With H = 1, F = 1, an
    outer learning rate of 1 and no momentum, every rank holds the previous step's average plus its own last step.

    Cost for weights of S bytes: 1 call every H steps. Every rank sends and receives 2(n-1)/n S / (F H) per step on
    average, and waits for none of it if it takes less than H steps. With `--compress` the fragments are compressed,
    with error feedback if the codec has it. In memory 3 S, and one more fragment. Choose it if a step takes far less
    time than sending its gradients.
    """

    options_kind: type[Options] = DiLoCoOptions

    def attach(self, model: nn.Module) -> Callable:
        call = super().attach(model)
        self._fragments: list[list[Fragment]] = [[] for _ in range(self.options.fragments)]  # one per dtype in each
        for dtype in dict.fromkeys(p.dtype for _, p in self.parameters):
            weights = [p for _, p in self.parameters if p.dtype == dtype]
            for place, cuts in enumerate(cut_in_rows(weights, self.options.fragments)):
                codec = make_codec(self.options.compress, self._start_sum, self.group)
                self._fragments[place].append(Fragment(f"fragment {place}", weights, cuts, codec))
        return call

    @torch.no_grad()
    def after_step(self) -> None:
        self.steps += 1
        self.replicas_equal = self.ranks == 1
        if self.steps % self.options.sync_every:
            return
        for fragment in self._every():
            fragment.step(self.options.outer_learning_rate, self.options.outer_momentum)
        for fragment in self._fragments[self.steps // self.options.sync_every % len(self._fragments)]:
            with self.ledger.naming(fragment.name):
                fragment.start(self.ranks)

    @torch.no_grad()
    def average_weights(self) -> None:
        for fragment in self._every():
            fragment.drop()
        super().average_weights()
        for fragment in self._every():
            fragment.agree()

    def own_state(self) -> dict[str, torch.Tensor]:
        """As for `local_sgd`, and each fragment's momentum. Settled, the agreed weights are the model's."""
        own = super().own_state()
        for place, fragment in enumerate(self._every()):
            own |= {f"{place}/{name}": tensor for name, tensor in fragment.state().items()}
        return own

    def load_own_state(self, state: Mapping[str, torch.Tensor]) -> None:
        super().load_own_state(state)
        for place, fragment in enumerate(self._every()):
            fragment.agree()
            fragment.load({name.partition("/")[2]: t for name, t in state.items() if name.startswith(f"{place}/")})

    def detach(self) -> None:
        for fragment in self._every():
            fragment.drop()
        self._fragments = []
        super().detach()

    def _every(self) -> Iterator["Fragment"]:
        for fragments in self._fragments:
            yield from fragments

    def _start_sum(self, numbers: torch.Tensor, name: str) -> End:
        return dist.all_reduce(numbers, group=self.group, async_op=True).wait


class RowRange(NamedTuple):
    """Rows [first, end) of the tensor at index `place`."""

    place: int
    first: int
    end: int


def cut_in_rows(tensors: Sequence[torch.Tensor], count: int) -> list[list[RowRange]]:
    """All rows of the tensors, in order, in at most `count` fragments whose sizes differ by about a row."""
    total = sum(tensor.numel() for tensor in tensors)
    fragments: list[list[RowRange]] = [[] for _ in range(count)]
    begin = 0  # of the tensor, in elements
    for place, tensor in enumerate(tensors):
        height = len(tensor) if tensor.dim() else 1
        first, width = 0, tensor.numel() // height
        while first < height:
            fragment = (begin + first * width) * count // total
            limit = -(-(fragment + 1) * total // count)  # where the next fragment begins
            end = min(height, max(first + 1, -(-(limit - begin) // width)))
            fragments[fragment].append(RowRange(place, first, end))
            first = end
        begin += tensor.numel()
    return [fragment for fragment in fragments if fragment]


class Fragment:
    """Rows of some parameters of one dtype, their last agreed weights, and their average while it is being sent.

    agreed     the weights that all ranks agree on as the model: the same on each
    momentum   the momentum of the steps that change them
    """

    def __init__(self, name: str, parameters: Sequence[nn.Parameter], cuts: Sequence[RowRange], codec: Codec):
        self.name, self.codec, self._parameters, self._cuts = name, codec, parameters, cuts
        self.agreed = self._side_by_side()
        self.momentum = torch.zeros_like(self.agreed)
        self._moved = torch.empty_like(self.agreed)
        self._before: torch.Tensor | None = None  # this rank's weights when their average was started
        self._end: End | None = None

    def start(self, ranks: int) -> None:
        """Start to average the difference between the agreed weights and this rank's."""
        self._before = self._side_by_side()
        torch.sub(self.agreed, self._before, out=self._moved).div_(ranks)
        numbers = torch.view_as_real(self._moved).view(-1) if self._moved.is_complex() else self._moved
        self._end = self.codec.start(self.name, numbers, [rows.shape for rows in self._rows()])

    def step(self, learning_rate: float, momentum: float) -> None:
        """Wait for the average, if one was started. The agreed weights make Nesterov's step along it. This rank's
        weights change by the difference between the new agreed weights and its weights when the average was started. So
        the rank keeps what it has learned since."""
        if self._before is None or self._end is None:
            return
        self._end()
        mean = self._moved
        self.momentum.mul_(momentum).add_(mean)
        self.agreed.sub_(mean.add_(self.momentum, alpha=momentum), alpha=learning_rate)
        change = self.agreed - self._before
        for rows, part in zip(self._rows(), change.split([rows.numel() for rows in self._rows()]), strict=True):
            rows.add_(part.view_as(rows))
        self._before = self._end = None

    def drop(self) -> None:
        """Drop the average that is being sent, because it is outdated."""
        if self._end is not None:
            self._end()
        self._before = self._end = None

    def agree(self) -> None:
        """Make the current weights, equal on all ranks, the agreed ones."""
        self.agreed.copy_(self._side_by_side())

    def state(self) -> dict[str, torch.Tensor]:
        """What it keeps while no average is being sent."""
        return {"momentum": self.momentum} | {f"codec/{name}": each for name, each in self.codec.state().items()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from a `state`; of other fragments, nothing."""
        if "momentum" in state and state["momentum"].shape == self.momentum.shape:
            self.momentum.copy_(state["momentum"])
            codec = {name.removeprefix("codec/"): each for name, each in state.items() if name.startswith("codec/")}
            self.codec.load(codec, self.momentum.device)

    def _rows(self) -> list[torch.Tensor]:
        """Views of the rows in the parameters' memory."""
        weights = [(self._parameters[cut.place].detach(), cut) for cut in self._cuts]
        return [weight[cut.first : cut.end] if weight.dim() else weight for weight, cut in weights]

    def _side_by_side(self) -> torch.Tensor:
        return torch.cat([rows.flatten() for rows in self._rows()])
