"""Our strategies in Hugging Face's Trainer, next to its own DDP.

`torchrun --nproc_per_node 2 examples/trainer_sync.py`
"""

import sys
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn
from transformers import PrinterCallback, Trainer, TrainingArguments

import cos598d


class SyncTrainer(Trainer):
    """A Trainer that trains with `cos598d.parallelize` where DistributedDataParallel stood.

    `sync` holds the arguments of parallelize, such as {"sync": "zero3"} or {"sync": "bucketed", "compress": "bf16"}.
    While the Trainer accumulates, nothing is sent, except under zero2 and zero3. It saves under plain names.
    """

    def __init__(self, *arguments, sync, **named):
        super().__init__(*arguments, **named)
        self._sync = sync

    def _wrap_model(self, model, training=True, dataloader=None):
        if not training or self.args.world_size == 1 or model is not self.model:
            return super()._wrap_model(model, training, dataloader)
        wrapped, self.optimizer = cos598d.parallelize(model, lambda _: self.optimizer, **self._sync)
        self.accelerator._models.append(wrapped)  # else an evaluation places the model again
        return wrapped

    def _settle(self):
        if self.model_wrapped is not self.model:
            self.model_wrapped.settle()

    def evaluation_loop(self, *arguments, **named):
        """Every rank has the same whole model."""
        self._settle()
        return super().evaluation_loop(*arguments, **named)

    def save_model(self, *arguments, **named):
        """Rank 0 saves the whole model."""
        self._settle()
        super().save_model(*arguments, **named)

    def _clip_grad_norm(self, model):
        if self.model_wrapped is self.model:
            return super()._clip_grad_norm(model)
        return self.model_wrapped.clip_grad_norm_(self.args.max_grad_norm)


class Digits(nn.Module):
    """The model of digits.py, with its loss, as the Trainer calls it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images, labels):
        logits = self.layers(images)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def train(kind, **named):
    """The losses of ten steps of the digits, each the mean over the ranks."""
    images, labels = load_digits(return_X_y=True)
    rows = [{"images": torch.tensor(row / 16).float(), "labels": int(label)} for row, label in zip(images, labels)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=10,
            per_device_train_batch_size=32,
            learning_rate=0.5,
            optim="sgd",
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            log_level="error",
        )
        trainer = kind(Digits(), arguments, train_dataset=rows, **named)
        trainer.pop_callback(PrinterCallback)
        trainer.train()
    return trainer.is_world_process_zero(), [row["loss"] for row in trainer.state.log_history if "loss" in row]


def main():
    for name in sys.argv[1:] or ("ddp", "ring", "zero3"):
        is_first, losses = train(Trainer) if name == "ddp" else train(SyncTrainer, sync={"sync": name})
        if is_first:
            print(f"{name}: {' '.join(f'{float(loss):.6f}' for loss in losses)}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
