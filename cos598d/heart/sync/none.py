"""No synchronization: a single process, and the compute-only baseline for exposed communication."""

from cos598d.heart.comm.ledger import Ledger
from cos598d.heart.sync.base import GradientSync, Options


class NoSync(GradientSync):
    """Every rank keeps its own gradients, and the replicas drift apart.

    Cost: 0 calls, 0 bytes. Subtract an iteration's time from that of another sync: that is its exposed communication.
    """

    def __init__(self, ledger: Ledger, options: Options = Options(), group=None):
        super().__init__(ledger, options, group)
        self.replicas_equal = self.ranks == 1

    def finish(self) -> None:
        """Nothing to do: the local gradients are the result."""
