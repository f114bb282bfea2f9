"""Our strategies in Lightning Fabric; the digits: `python examples/fabric_strategy.py`."""

import contextlib
import sys
from datetime import timedelta

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from sklearn.datasets import load_digits
from torch import nn

import cos598d


class SyncStrategy(DDPStrategy):
    """Fabric's DDP strategy with `cos598d.parallelize` where DistributedDataParallel stood.

        strategy = SyncStrategy(sync="zero3", timeout=timedelta(seconds=60))
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        model, optimizer = fabric.setup(model, optimizer)

    `sync` is one of parallelize (ring, sparse_rows, zero3, ...). Its other arguments (ledger, bucket_mb, ...) and those
    of DDPStrategy are given by name. `fabric.no_backward_sync` sends nothing. `fabric.save` and `fabric.load`
    use the model's plain names.

    `replica` is what Fabric's model holds: `replica.settle()`, called on every rank before evaluating, gives all ranks
    the same whole model.

    Fabric or torchrun starts the ranks, and our watchdog does not watch over them. Where one is killed, the others'
    next collective fails with torch's error at once, since the connection is gone. Where one is stuck, and under
    shared_memory, which has no connection, they fail after `timeout`: half an hour, unless you give one, and it has to
    cover the start of the slowest rank too. Rank 0, if Lightning started the others from it, looks every 5 s whether
    one of them has failed, and then kills all, itself too.
    """

    def __init__(self, **arguments):
        super().__init__(**arguments)  # what it does not know it keeps for DDP, in _ddp_kwargs
        self._backward_sync_control = _NoSync()
        self.replica = None

    def setup_module_and_optimizers(self, module, optimizers, scheduler=None):
        """Wrap the model and its optimizer. Shards need one optimizer, in the same call of `fabric.setup`."""
        if len(optimizers) != 1:
            return self.setup_module(module), optimizers, scheduler
        (whole,), arguments = optimizers, self._arguments()
        self.replica, ours = cos598d.parallelize(module, lambda _: whole, arguments.pop("sync"), **arguments)
        return self.replica, [ours], scheduler

    def setup_module(self, module):
        """Wrap a model by itself, whose gradients are averaged."""
        self.replica = cos598d.data_parallel(module, **self._arguments())
        return self.replica

    def _arguments(self):
        return {"sync": "bucketed"} | self._ddp_kwargs

    def clip_gradients_norm(self, module, optimizer, max_norm, *_, **__):
        """By the L2 norm of the whole average, of which a rank may have only a part."""
        return module.clip_grad_norm_(max_norm)

    def get_module_state_dict(self, module):
        """Whole, under every strategy."""
        module.settle()
        return module.state_dict()


class _NoSync(_BackwardSyncControl):
    def no_backward_sync(self, module, enabled):
        return module.no_sync() if enabled else contextlib.nullcontext()


def train(strategy, steps):
    """Train the digits on two ranks; the Fabric, each batch's mean loss, and the mean loss of all digits after it."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    rank, ranks = fabric.global_rank, fabric.world_size
    torch.manual_seed(0)
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = images.float() / 16
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
    losses = []
    for _ in range(steps):
        batch = torch.randint(0, len(labels), (64,))[rank::ranks]  # the same draw on every rank; its own share
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    strategy.replica.settle() if isinstance(strategy, SyncStrategy) else None
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(images), labels)
    return fabric, fabric.all_reduce(torch.tensor(losses), reduce_op="mean").tolist(), loss.item()


def main():
    for name in sys.argv[1:] or ("ddp", "ring", "zero3"):
        each = name if name == "ddp" else SyncStrategy(sync=name, timeout=timedelta(seconds=60))
        fabric, losses, _ = train(each, steps=10)
        fabric.print(f"{name}: {' '.join(f'{loss:.6f}' for loss in losses)}")
    ledger = cos598d.Ledger()
    strategy = SyncStrategy(sync="ring", ledger=ledger, timeout=timedelta(seconds=60))
    with ledger:
        fabric, _, loss = train(strategy, steps=100)
    fabric.print(f"loss after 100 steps: {loss:.6f}")
    for purpose, (calls, _, sent, _) in ledger.by_purpose.items():
        fabric.print(f"{purpose}: {calls} calls, {sent} bytes sent")


if __name__ == "__main__":
    main()
