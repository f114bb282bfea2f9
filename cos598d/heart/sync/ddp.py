"""Task 3: torch's DistributedDataParallel, unchanged."""

from contextlib import AbstractContextManager

from torch.nn.parallel import DistributedDataParallel

from cos598d.heart.sync.base import GradientSync


class DDP(GradientSync):
    """Averaging in buckets while backward runs, by torch (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2).

    1. Gradients are assigned to buckets of 25 MiB (the first of 1 MiB), at first in the reverse order of registration,
       after the first backward in the order in which they arrived.
    2. A full bucket's all-reduce starts at once. The end of backward waits for all and copies the averages back.
    3. Before a step's first forward, rank 0 sends its buffers, if the model has any.

    Cost for a gradient of S bytes in B buckets: B calls; every rank sends and receives 2(n-1)/n S. torch makes these
    calls itself, in C++; the ledger sees them as it sees all others. Choose it for real work.
    """

    def attach(self, model):
        super().attach(model)
        default = self.options.bucket_mb == type(self.options).bucket_mb
        self._ddp = DistributedDataParallel(
            model,
            process_group=self.group,
            find_unused_parameters=self.options.find_unused_parameters,
            bucket_cap_mb=None if default else self.options.bucket_mb,  # None: its own, with a small first one
        )
        return self._ddp

    def no_sync(self) -> AbstractContextManager[None]:
        return self._ddp.no_sync()

    def finish(self) -> None:
        """Nothing to do: the end of backward has waited."""

    def detach(self) -> None:
        self._ddp._remove_autograd_hooks()
        super().detach()
