"""The same digits with a gradient sync of cos598d: `torchrun --nproc_per_node 4 examples/digits.py`."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import cos598d

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
images = images.float() / 16
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
ledger = cos598d.Ledger()
model = cos598d.data_parallel(model, sync="ring", ledger=ledger)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
with ledger:
    for _ in range(100):
        batch = torch.randint(0, len(labels), (64,))[
            rank::ranks
        ]  # the same draw on every rank, and its own share of it
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
with torch.no_grad():
    loss = nn.functional.cross_entropy(model(images), labels)
if rank == 0:
    print(f"loss after 100 steps: {loss:.6f}")
    for purpose, (calls, _, sent, _) in ledger.by_purpose.items():
        print(f"{purpose}: {calls} calls, {sent} bytes sent")
dist.destroy_process_group()
