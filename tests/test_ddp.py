"""What the ledger says of torch's own buckets."""

import torch
from worlds import run_ranks

from cos598d.measure.ledger import GRADIENTS, Ledger
from cos598d.sync.base import SyncOptions
from cos598d.sync.ddp import DDP


def buckets_by_step(comm):
    """On a rank: the elements of each bucket in four steps of a model of 20 layers of 40 kB."""
    model = torch.nn.Sequential(*[torch.nn.Linear(100, 100) for _ in range(20)])
    sync = DDP(comm, find_unused_parameters=False, options=SyncOptions(bucket_mb=0.1))
    module = sync.attach(model)
    found = []
    for _ in range(4):
        comm.ledger = Ledger()
        module(torch.ones(2, 100)).sum().backward()
        sync.finish()
        found.append([row.shape[0] for row in comm.ledger.rows if row.purpose == GRADIENTS])
        model.zero_grad(set_to_none=True)
    return found


def test_the_ledger_has_torchs_buckets_from_the_second_step_on():
    for found in run_ranks(2, buckets_by_step):
        assert [sum(sizes) for sizes in found] == [20 * 100 * 101] * 4
        # 0.1 MiB is three layers' 26,214 elements at most, and torch closes a bucket when it has reached that.
        assert found[1] == found[2] == found[3]
        assert found[1] == [30_300] * 6 + [20_200]
