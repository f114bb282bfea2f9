"""Which samples this rank trained and evaluated on: of the first epoch, and of the last evaluation."""

import torch

from cos598d.tools.audit.watch.batches import batch_size, sample_digests

MOST = 8192


class Samples:
    """Digests of samples in their order; training's until one epoch is over, or MOST have been seen."""

    def __init__(self) -> None:
        self.training: list[str] = []
        self.evaluation: list[str] = []
        self.evaluated = self.evaluation_batches = 0  # in all
        self._seen: set[str] = set()
        self._is_over = False

    def trained(self, batch: list[torch.Tensor], epoch_is_over: bool) -> None:
        """A batch that was trained on."""
        if self._is_over or epoch_is_over or len(self.training) >= MOST:
            self._is_over = True
            return
        found = sample_digests(batch)
        if found and self._seen.issuperset(found) and len(self._seen) > len(found):
            self._is_over = True  # a loop without a loader has begun anew
            return
        self._seen.update(found)
        self.training += found[: MOST - len(self.training)]

    def evaluation_begins(self) -> None:
        """What was evaluated before was another evaluation: the last one is compared."""
        self.evaluation, self.evaluated, self.evaluation_batches = [], 0, 0

    def evaluate(self, batch: list[torch.Tensor]) -> None:
        """A batch that went through the model without gradients."""
        self.evaluated += batch_size(batch)
        self.evaluation_batches += 1
        if len(self.evaluation) < MOST:
            self.evaluation += sample_digests(batch)[: MOST - len(self.evaluation)]
