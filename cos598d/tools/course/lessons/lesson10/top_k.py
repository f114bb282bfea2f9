"""Ways to send the largest elements with error feedback, right and wrong, simulated in one process."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TopKVariant:
    """A way to do it, right or wrong. `held` is what a step leaves to the next; `words` say what is wrong with it."""

    words: str
    held: str = "the rest"
    signed: bool = False
    divides: bool = True
    by_name: bool = True
    rounded_up: bool = False
    least: int = 1
    joins: str = "adds"


RIGHT = TopKVariant("")
NO_FEEDBACK = TopKVariant(
    "what was held back is never sent: add it to the next step's gradient of this name", "nothing"
)
MISTAKES = (
    NO_FEEDBACK,
    TopKVariant("it is the sum over the ranks and should be their average: divide by n", divides=False),
    TopKVariant("the largest were taken with their sign: take the largest absolute values", signed=True),
    TopKVariant("what was sent is held back as well, and is sent again: set it to zero in what is held back", "all"),
    TopKVariant(
        "what arrived was subtracted from what is held back, instead of what this rank sent", "less the average"
    ),
    TopKVariant("all names share what is held back: keep it by name", by_name=False),
    TopKVariant(
        "if two ranks sent an element, only one of them is left: add what comes in, gradient[places] += values",
        joins="replaces",
    ),
    TopKVariant("what comes in is added to the rank's own gradient: set that to zero first", joins="on its own"),
    TopKVariant(
        "an element is divided by the number of ranks that sent it: divide by n, since a rank that did not send it "
        "counts as 0",
        joins="by senders",
    ),
    TopKVariant(
        "values were put at this rank's places: each rank's values belong at its own places", joins="at its places"
    ),
    TopKVariant(
        "what is held back was overwritten by the average: keep a copy (clone) before `gradient` changes", "the result"
    ),
    TopKVariant("k is rounded, but should be cut off: max(1, int(share * elements))", rounded_up=True),
    TopKVariant("nothing of a small tensor is sent: k is max(1, int(share * elements))", least=0),
)


def count_of(share: float, elements: int, way: TopKVariant = RIGHT) -> int:
    """How many of a tensor's elements are sent."""
    return max(way.least, math.ceil(share * elements) if way.rounded_up else int(share * elements))


class Simulation:
    """`average` on all ranks at once, in one process, as one way of doing it has it."""

    def __init__(self, share: float, way: TopKVariant = RIGHT):
        self._share, self._way = share, way
        self._held: dict[tuple[str, int], torch.Tensor] = {}

    def average(self, name: str, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What each rank is left with, from each rank's own (elements,)."""
        way, sent, wholes, places = self._way, [], [], []
        keys = [(name if way.by_name else "", rank) for rank in range(len(gradients))]
        for key, gradient in zip(keys, gradients, strict=True):
            wholes.append(gradient + self._held.get(key, torch.zeros_like(gradient)))
            order = wholes[-1] if way.signed else wholes[-1].abs()
            places.append(order.topk(count_of(self._share, len(gradient), way)).indices)
            sent.append(torch.zeros_like(gradient).index_copy_(0, places[-1], wholes[-1][places[-1]]))
        averages = [self._joined(rank, sent, wholes, places) for rank in range(len(gradients))]
        for rank, key in enumerate(keys):
            self._held[key] = {
                "the rest": wholes[rank] - sent[rank],
                "nothing": torch.zeros_like(wholes[rank]),
                "all": wholes[rank],
                "less the average": wholes[rank] - averages[rank],
                "the result": averages[rank],
            }[way.held]
        return averages

    def _joined(
        self, rank: int, sent: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], places: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """What one rank makes of all that was sent."""
        way = self._way
        total = torch.stack(list(sent)).sum(dim=0)
        if way.joins == "replaces":
            for one, where in zip(sent, places, strict=True):
                total[where] = one[where]
        elif way.joins == "on its own":
            total += wholes[rank]
        elif way.joins == "at its places":
            values = torch.stack([whole[where] for whole, where in zip(wholes, places, strict=True)]).sum(dim=0)
            total = torch.zeros_like(total).index_copy_(0, places[rank], values)
        elif way.joins == "by senders":
            senders = torch.stack([torch.zeros_like(total).index_fill_(0, where, 1) for where in places]).sum(dim=0)
            return total / senders.clamp(min=1)
        return total / (len(sent) if way.divides else 1)
