"""The same digits in shards: `torchrun --nproc_per_node 4 examples/digits_shards.py zero3`, or `ddp`.

With `ddp`, torch's DDP averages, and ShardedOptimizer keeps an n-th of the optimizer's state on each rank.
"""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cos598d

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
images = images.float() / 16
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
ledger = cos598d.Ledger()
strategy = sys.argv[1] if len(sys.argv) > 1 else "zero3"
if strategy == "ddp":
    model = DistributedDataParallel(model)
    optimizer = cos598d.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.5)
else:
    model, optimizer = cos598d.parallelize(
        model, lambda params: torch.optim.SGD(params, lr=0.5), strategy, ledger=ledger
    )
with ledger:
    for _ in range(100):
        # The same draw on every rank, and its own share of it.
        batch = torch.randint(0, len(labels), (64,))[rank::ranks]
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
with torch.no_grad():  # on every rank: under zero3 each has a part of the weights
    loss = nn.functional.cross_entropy(model(images), labels)
if rank == 0:
    print(f"loss after 100 steps: {loss:.6f}")
    for purpose, (calls, _, sent, _) in ledger.by_purpose.items():
        print(f"{purpose}: {calls} calls, {sent} bytes sent")
dist.destroy_process_group()
