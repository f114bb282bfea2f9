"""What a bench computes: a model, one replica of it per candidate, and batches of one fixed shape."""

import copy
from collections.abc import Callable

import torch
from torch import nn

from cos598d.data import get_task
from cos598d.models.build import ModelSource, build_model
from cos598d.precision import autocast

TASK = get_task("rte")


class Workload:
    """One rank's model and batches: `batch` examples of the bundled RTE sample, each of exactly `tokens` tokens.

    All candidates compute in `precision`.
    """

    def __init__(
        self,
        source: ModelSource,
        device: torch.device,
        batch: int,
        tokens: int,
        seed: int,
        precision: str = "fp32",
    ):
        self.model = build_model(source, TASK.head, TASK.num_labels, 0.0, seed).to(device)
        TASK.find(None)
        self.features = TASK.load("train", source.encoder, tokens)
        self._device, self._batch, self._tokens = device, batch, tokens
        self.precision = precision

    @property
    def gradient_bytes(self) -> int:
        """The gradient's size S in bytes."""
        return sum(p.nbytes for p in self.model.parameters() if p.requires_grad)

    def inputs(self, number: int, rank: int, ranks: int) -> dict[str, torch.Tensor]:
        """A rank's part of batch `number`: other examples on every rank, filled up to all tokens, which all count.

        Ids and mask (batch, tokens), labels (batch,).
        """
        first = (number * ranks + rank) * self._batch
        batch = self.features.collate([(first + place) % len(self.features) for place in range(self._batch)])
        batch["attention_mask"].fill_(1)
        fillers = {"input_ids": 0, "attention_mask": 1, "token_type_ids": 0}
        sides = (0, self._tokens - batch["input_ids"].shape[1])
        return {
            name: (nn.functional.pad(tensor, sides, value=fillers[name]) if name in fillers else tensor).to(
                self._device
            )
            for name, tensor in batch.items()
        }

    def computing(self, module: Callable[..., tuple]) -> Callable[..., tuple]:
        """`module` for training in this workload's precision."""

        def call(**inputs: torch.Tensor) -> tuple:
            with autocast(self.precision, self._device):
                return module(**inputs)

        return call

    def replica(self, shares: bool = True) -> nn.Module:
        """A model with its own gradients and hooks, whose weights share memory with all other replicas'.

        So several candidates can stay attached without a copy of the weights for each. One that `shares` no memory is
        for syncs that shard, which move or free their weights.
        """
        if not shares:
            return copy.deepcopy(self.model)
        shared: dict[int, torch.Tensor] = {
            id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in self.model.parameters()
        }
        shared |= {id(buffer): buffer for buffer in self.model.buffers()}
        return copy.deepcopy(self.model, shared)
