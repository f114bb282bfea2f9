"""Our gradient syncs in Hugging Face's Accelerate, next to its own DDP.

`torchrun --nproc_per_node 2 examples/accelerate_sync.py`
"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn

import cos598d


class SyncAccelerator(Accelerator):
    """An Accelerator whose models are wrapped by `cos598d.data_parallel` where DistributedDataParallel stood.

    `sync` holds the arguments of data_parallel, such as {"sync": "sparse_rows", "compress": "bf16"}. `accumulate` and
    `no_sync` send nothing meanwhile. `model.module` is the plain model, `model.settle()` gives all ranks rank 0's
    buffers before evaluating, and `model.ledger.totals()` says what has travelled.
    """

    def __init__(self, *, sync, **arguments):
        super().__init__(**arguments)
        self._sync = sync

    def prepare_model(self, model, device_placement=None, evaluation_mode=False):
        """Place the model as Accelerate does, then wrap it."""
        placed = super().prepare_model(model, device_placement, evaluation_mode=True)
        if evaluation_mode or self.num_processes == 1:
            return placed
        wrapped = cos598d.data_parallel(placed, **self._sync)
        self._models[-1] = wrapped
        return wrapped

    def unwrap_model(self, model, *arguments, **named):
        """The plain model."""
        return super().unwrap_model(getattr(model, "module", model), *arguments, **named)


def train(accelerator):
    """The mean losses of ten steps of the digits."""
    torch.manual_seed(0)
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = images.float() / 16
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    losses = []
    for _ in range(10):
        batch = torch.randint(0, len(labels), (64,))[accelerator.process_index :: accelerator.num_processes]
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def main():
    for name, accelerator in (
        ("ddp", Accelerator(cpu=True)),
        ("ours", SyncAccelerator(cpu=True, sync={"sync": "ring"})),
    ):
        losses = train(accelerator)
        accelerator.print(f"{name}: {' '.join(f'{loss:.6f}' for loss in losses)}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
