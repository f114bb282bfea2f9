"""No synchronization: a single process, and the compute-only baseline for exposed communication."""

from cos598d.comm.communicator import Communicator
from cos598d.sync.base import GradientSync
from cos598d.sync.cost import CollectiveCall, Step
from cos598d.sync.options import DEFAULTS, SyncOptions


class NoSync(GradientSync):
    """Every rank keeps its own gradients.

    1. Before training every rank receives rank 0's state, as in every sync.
    2. After that nothing is sent. With several ranks the replicas drift apart: in their weights, in their buffers and,
       under fp16, in their loss scales and learning rates too.

    Cost: 0 calls, 0 bytes. Choose it for one process (task 1). On n ranks use it only to measure: subtract an
    iteration's time with this sync from that with another, and you get its exposed communication.
    """

    keeps_nothing = takes_sparse = True

    def __init__(self, comm: Communicator, find_unused_parameters: bool = True, options: SyncOptions = DEFAULTS):
        super().__init__(comm, find_unused_parameters, options)
        self.replicas_equal = comm.world_size == 1

    def settle(self) -> None:
        """Nothing to do: the replicas stay different."""

    def finish(self) -> None:
        """Nothing to do: the local gradients are the result."""

    @classmethod
    def calls(cls, step: Step) -> list[CollectiveCall]:
        return []
