"""Our strategies in Lightning's Trainer; the digits: `python examples/lightning_strategy.py`."""

import sys
from datetime import timedelta

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

import cos598d


class SyncStrategy(DDPStrategy):
    """The Trainer's DDP strategy with `cos598d.parallelize` where DistributedDataParallel stood.

        strategy = SyncStrategy(sync="zero3", timeout=timedelta(seconds=60))
        Trainer(accelerator="cpu", devices=2, strategy=strategy, accumulate_grad_batches=4)

    `sync` is one of parallelize (ring, sparse_rows, zero3, ...). Its other arguments (ledger, bucket_mb, ...) and those
    of DDPStrategy are given by name. While the Trainer accumulates, nothing is sent, except under zero2 and
    zero3. Its checkpoints have the model's plain names. Validation begins with the same whole model on every rank.

    The Trainer or torchrun starts the ranks, and our watchdog does not watch over them. Where one is killed, the
    others' next collective fails with torch's error at once, since the connection is gone. Where one is stuck, and
    under shared_memory, which has no connection, they fail after `timeout`: half an hour, unless you give one, and it
    has to cover the start of the slowest rank too. Rank 0, if Lightning started the others from it, looks every 5 s
    whether one of them has failed, and then kills all, itself too.
    """

    def __init__(self, **arguments):
        super().__init__(**arguments)  # what it does not know it keeps for DDP, in _ddp_kwargs
        self.replica = None

    def configure_ddp(self):
        """Nothing yet: the model is wrapped with its optimizer."""

    def setup_optimizers(self, trainer):
        """Wrap the model and its optimizer. Shards need one optimizer; with several, gradients are averaged."""
        super().setup_optimizers(trainer)
        arguments = {"sync": "bucketed"} | self._ddp_kwargs
        if len(self.optimizers) == 1:
            (whole,) = self.optimizers
            self.replica, ours = cos598d.parallelize(self.model, lambda _: whole, arguments.pop("sync"), **arguments)
            self.optimizers = [ours]
            # By the norm of the whole average, of which a rank may have only a part.
            self.precision_plugin.clip_grad_by_norm = lambda _, max_norm: self.replica.clip_grad_norm_(max_norm)
            for config in self.lr_scheduler_configs:
                config.scheduler.optimizer = ours
        else:
            self.replica = cos598d.data_parallel(self.model, **arguments)
        self.model = self.replica

    def on_validation_start(self):
        """DDP sends rank 0's buffers before each forward: here they travel once, when they are needed."""
        if self.model is self.replica:
            self.replica.settle()

    def lightning_module_state_dict(self):
        """Whole, under every strategy."""
        if self.model is self.replica:
            self.replica.settle()
        return super().lightning_module_state_dict()

    def teardown(self):
        """Give the model back without hooks, so that the next fit begins anew."""
        if self.model is self.replica and self.replica is not None:
            self.model = self.replica.detach()
        super().teardown()


class Digits(LightningModule):
    """The model and the batches of digits.py."""

    def __init__(self, steps):
        super().__init__()
        self.losses = []
        torch.manual_seed(0)
        images, self.labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
        self.images = images.float() / 16
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.draws = [torch.randint(0, len(self.labels), (64,)) for _ in range(steps)]  # the same ones on every rank

    def train_dataloader(self):
        """This rank's share of each draw."""
        return DataLoader([draw[self.global_rank :: self.trainer.world_size] for draw in self.draws], batch_size=None)

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.layers(self.images[batch]), self.labels[batch])
        self.losses.append(loss.item())
        return loss

    def on_train_end(self):
        """The losses are now each batch's mean over the ranks."""
        self.losses = self.trainer.strategy.reduce(torch.tensor(self.losses), reduce_op="mean").tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def train(strategy, steps):
    """Train the digits on two ranks; the Trainer and the model."""
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        use_distributed_sampler=False,  # the batches are shares already
        logger=False,
        enable_checkpointing=False,
    )
    model = Digits(steps)
    trainer.fit(model)
    return trainer, model


def main():
    for name in sys.argv[1:] or ("ddp", "ring", "zero3"):
        each = name if name == "ddp" else SyncStrategy(sync=name, timeout=timedelta(seconds=60))
        trainer, model = train(each, steps=10)
        if trainer.is_global_zero:
            print(f"{name}: {' '.join(f'{loss:.6f}' for loss in model.losses)}")
    ledger = cos598d.Ledger()
    strategy = SyncStrategy(sync="ring", ledger=ledger, timeout=timedelta(seconds=60))
    with ledger:
        trainer, model = train(strategy, steps=100)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model.layers(model.images), model.labels)
    if trainer.is_global_zero:
        print(f"loss after 100 steps: {loss:.6f}")
        for purpose, (calls, _, sent, _) in ledger.by_purpose.items():
            print(f"{purpose}: {calls} calls, {sent} bytes sent")


if __name__ == "__main__":
    main()
