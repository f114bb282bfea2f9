"""Which samples this rank trained and evaluated on: of the first epoch, and of the last evaluation."""

import math
from typing import Any

import torch

from cos598d.tools.audit.watch.batches import batch_size, sample_digests

MOST = 8192
_COARSE = (torch.bfloat16, torch.float16)  # of so few digits any number is a share of a power of 2
_MOST_SUMS, _MOST_NUMBERS = 64, 8  # calls of an evaluation that add up numbers, and numbers in one


class Samples:
    """Digests of samples in their order; training's until one epoch is over, or MOST have been seen."""

    def __init__(self) -> None:
        self.training: list[str] = []
        self.evaluation: list[str] = []
        self.evaluated = self.evaluation_batches = 0  # in all
        self.sums: list[dict[str, Any]] = []  # numbers that the last evaluation adds up over the ranks
        self._rows = self._begun = 0
        self._seen: set[str] = set()
        self._is_over = False

    def trained(self, batch: list[torch.Tensor], epoch_is_over: bool) -> None:
        """A batch that was trained on."""
        if self._is_over or epoch_is_over or len(self.training) >= MOST:
            self._is_over = True
            return
        found = sample_digests(batch)
        if found and self._seen.issuperset(found) and len(self._seen) > len(found):
            self._is_over = True  # a loop without a loader has started again
            return
        self._seen.update(found)
        self.training += found[: MOST - len(self.training)]

    def evaluation_begins(self) -> None:
        """What was evaluated before was another evaluation: the last one is compared."""
        self.evaluation, self.evaluated, self.evaluation_batches = [], 0, 0
        self.sums, self._rows = [], 0

    def evaluate(self, batch: list[torch.Tensor], begun: int) -> None:
        """A batch that went through the model without gradients; so many loaders and samplers have begun by then."""
        self._rows = batch_size(batch) + (self._rows if begun == self._begun else 0)
        self._begun = begun
        self.evaluated += batch_size(batch)
        self.evaluation_batches += 1
        if len(self.evaluation) < MOST:
            self.evaluation += sample_digests(batch)[: MOST - len(self.evaluation)]

    def adds_up(self, tensors: list[torch.Tensor], drawn: dict[str, Any], where: list[Any]) -> None:
        """An evaluation is about to add up these over the ranks; `drawn` is what its loader or sampler goes through."""
        elements = sum(each.numel() for each in tensors)
        are_exact = all(each.layout is torch.strided and each.dtype not in _COARSE for each in tensors)
        if self._rows and len(self.sums) < _MOST_SUMS and 0 < elements <= _MOST_NUMBERS and are_exact:
            values = [value for each in tensors for value in each.detach().double().flatten().tolist()]
            if all(map(math.isfinite, values)):
                self.sums.append({"values": values, "rows": self._rows, "where": where} | drawn)
