"""Task 3: torch's DistributedDataParallel, unchanged."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cos598d.sync.base import GradientSync
from cos598d.sync.options import Options


class DDP(GradientSync):
    """Averaging in buckets while backward runs, by torch (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2).

    1. Gradients are assigned to buckets of 25 MiB (the first of 1 MiB), in the reverse order of registration. If every
       parameter must be used, torch assigns them anew after the first step, in the order in which they arrived.
    2. A hook on each parameter copies its gradient into its bucket. The all-reduce of a full bucket starts when those
       of all buckets before it have started, while backward computes the next gradients.
    3. The end of backward waits for the buckets and copies the averages back.
    4. Before a step's first forward, rank 0 sends its buffers, if the model has any, to all.

    Cost for a gradient of S bytes in B buckets: B calls; every rank sends and receives 2(n-1)/n S. Only the last bucket
    cannot overlap with backward. If parameters may be unused, one more all-reduce of 4 bytes for each. Buffers of b
    bytes take one more broadcast for each of their dtypes: rank 0 sends ceil(log2 n) b. torch makes these calls in C++,
    and the ledger sees them as it sees all others. Choose it for real work.
    """

    takes = (*GradientSync.takes, "bucket_mb", "gradient_as_bucket_view")

    def attach(self, model: nn.Module) -> Callable:
        super().attach(model)
        with warnings.catch_warnings():  # torch 2.13 has another name for it, with another meaning
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            self._ddp = DistributedDataParallel(
                model,
                process_group=self.group,
                find_unused_parameters=self.options.find_unused_parameters,
                init_sync=False,  # `attach` has just done it
                # Passed only if it differs: torch then has no small first bucket.
                bucket_cap_mb=None if self.options.bucket_mb == Options.bucket_mb else self.options.bucket_mb,
                gradient_as_bucket_view=self.options.gradient_as_bucket_view,
                broadcast_buffers=self.options.broadcast_buffers,
            )
        return self._ddp

    def begin_forward(self) -> None:
        """Nothing to do: torch sends rank 0's buffers itself."""

    def no_sync(self) -> AbstractContextManager[None]:
        return self._ddp.no_sync()

    def finish(self) -> None:
        """Nothing to do: the end of backward has waited."""

    def detach(self) -> None:
        self._ddp._remove_autograd_hooks()
        del self._ddp
        super().detach()
