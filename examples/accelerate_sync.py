"""Our strategies in Hugging Face's Accelerate, next to its own DDP.

`torchrun --nproc_per_node 2 examples/accelerate_sync.py`
"""

import sys

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn

import cos598d


class SyncAccelerator(Accelerator):
    """An Accelerator whose models are wrapped by `cos598d.parallelize` where DistributedDataParallel stood.

    `sync` holds the arguments of parallelize, such as {"sync": "zero3"} or {"sync": "bucketed", "compress": "bf16"}. A
    model comes first in `prepare`, then its optimizer. `accumulate` and `no_sync` send nothing meanwhile, except under
    zero2 and zero3. `model.settle()`, on every rank, makes the plain `model.module` whole before evaluating.
    """

    def __init__(self, *, sync, **arguments):
        super().__init__(**arguments)
        self._sync, self._whole, self._ours = sync, None, None

    def prepare(self, *objects, device_placement=None):
        """As Accelerate's, for one model with its optimizer, or for what is neither."""
        (self._whole,) = [each for each in objects if isinstance(each, torch.optim.Optimizer)] or [None]
        return super().prepare(*objects, device_placement=device_placement)

    def prepare_model(self, model, device_placement=None, evaluation_mode=False):
        """Place the model as Accelerate does, then wrap it with its optimizer."""
        placed = super().prepare_model(model, device_placement, evaluation_mode=True)
        if evaluation_mode or self.num_processes == 1:
            return placed
        self._models[-1], self._ours = cos598d.parallelize(placed, lambda _: self._whole, **self._sync)
        return self._models[-1]

    def prepare_optimizer(self, optimizer, device_placement=None):
        """What steps the wrapped model."""
        return super().prepare_optimizer(self._ours or optimizer, device_placement)

    def prepare_scheduler(self, scheduler):
        """It sets the rates of what steps the wrapped model."""
        scheduler.optimizer = self._ours or scheduler.optimizer
        return super().prepare_scheduler(scheduler)

    def clip_grad_norm_(self, parameters, max_norm, norm_type=2):
        """By the L2 norm of the whole average, of which a rank may have only a part."""
        return self._models[-1].clip_grad_norm_(max_norm)

    def get_state_dict(self, model, unwrap=True):
        """Whole, on every rank, under every strategy."""
        if model in self._models:
            model.settle()
        return super().get_state_dict(model, unwrap)

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
    for name in sys.argv[1:] or ("ddp", "ring", "zero3"):
        accelerator = Accelerator(cpu=True) if name == "ddp" else SyncAccelerator(cpu=True, sync={"sync": name})
        losses = train(accelerator)
        accelerator.print(f"{name}: {' '.join(f'{loss:.6f}' for loss in losses)}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
