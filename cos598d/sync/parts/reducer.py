"""What torch's DDP sends and keeps by itself, in C++: read from what its reducer reports of its buckets."""

import torch
from torch.nn.parallel import DistributedDataParallel

from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import dtype_name
from cos598d.records.conventions import AGREEMENT, BUFFERS


class Reducer:
    """The calls and the buckets of a DistributedDataParallel.

    DDP's calls pass no function that could be listened to, and a communication hook would slow them. But its logger
    tells the sizes of the buckets that were reduced, and the module how many buffers it has:

    1. Before a forward it is noted whether rank 0's buffers are about to be sent to all.
    2. After a step's backward `enter` writes into the ledger what that forward and this backward have sent.
    """

    def __init__(self, comm: Communicator, ddp: DistributedDataParallel, travels_as: torch.dtype | None = None):
        """`travels_as`: the dtype into which a communication hook puts the buckets; None: their own."""
        self._comm, self._ddp, self._travels_as = comm, ddp, travels_as
        self._parameters = [p for p in ddp.module.parameters() if p.requires_grad]
        self._buckets: list[tuple[str, int, torch.dtype]] = []
        self._steps = self._broadcasts = 0  # of this reducer, and of buffers in this step
        self._handle = ddp.register_forward_pre_hook(self._count_broadcast)

    def enter(self, gradients: bool = True) -> None:
        """Enter in the ledger what a step has sent; without its `gradients` where these were heard already."""
        for _ in range(self._broadcasts):
            buffers: list[torch.Tensor] = self._ddp.modules_buffers
            for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
                elements = sum(buffer.numel() for buffer in buffers if buffer.dtype == dtype)
                name = f"buffers of {dtype_name(dtype)}"
                self._comm.record("broadcast", name, (elements,), dtype, purpose=BUFFERS)
        self._broadcasts = 0
        self._steps += 1
        if self._steps <= 2:  # torch lays its buckets anew once, after the first backward
            self._buckets = self._read_buckets()
        if not gradients:
            return
        for name, elements, dtype in self._buckets:
            self._comm.record("all_reduce", name, (elements,), self._travels_as or dtype)
        if self._ddp.find_unused_parameters:
            self._comm.record(
                "all_reduce", "ranks that used each parameter", (len(self._parameters),), torch.int32, purpose=AGREEMENT
            )

    @property
    def steps(self) -> int:
        """How many it has entered."""
        return self._steps

    def resume(self, steps: int) -> None:
        """The DDP's buckets are laid as after so many steps, which another one has made."""
        self._steps = steps
        if steps:
            self._buckets = self._read_buckets()

    @property
    def bucket_bytes(self) -> int:
        """What the buckets take, which live as long as the DDP; 0 before the first `enter`."""
        return sum(elements * dtype.itemsize for _, elements, dtype in self._buckets)

    def close(self) -> None:
        """Listen no more; the DDP, which somebody may hold, does not average any more."""
        self._handle.remove()
        self._ddp._remove_autograd_hooks()

    def _count_broadcast(self, *_: object) -> None:
        self._broadcasts += self._ddp.will_sync_module_buffers()

    def _read_buckets(self) -> list[tuple[str, int, torch.dtype]]:
        """Name, elements and dtype of each bucket of the last backward, as torch's logger reports its reducer's."""
        assert self._ddp.logger is not None
        self._ddp.logger.set_runtime_stats_and_log()  # else it speaks of the step before
        facts = self._ddp._get_ddp_logging_data()
        rebuilt = self._steps > 1 and facts.get("has_rebuilt_buckets")
        sizes = facts["rebuilt_bucket_sizes" if rebuilt else "bucket_sizes"]
        # torch tells each bucket's bytes but not its dtype: a model of several is entered as plain bytes.
        dtypes = {p.dtype for p in self._parameters}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        return [
            (f"bucket {place}", int(size) // dtype.itemsize, dtype)
            for place, size in enumerate(part.strip() for part in sizes.split(","))
        ]
