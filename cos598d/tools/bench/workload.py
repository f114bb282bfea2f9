"""What a bench computes: a model, one replica of it per candidate, and batches of one fixed shape."""

import copy
from collections.abc import Callable, Iterable

import torch
from torch import nn

from cos598d.config import RunConfig
from cos598d.data import get_task
from cos598d.models.build import ModelSource, build_model
from cos598d.optimizers import make_optimizer
from cos598d.precision import autocast
from cos598d.sync.sparse_rows import LEAST_BYTES, large_embeddings

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
    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that get gradients, with their names."""
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    @property
    def gradient_bytes(self) -> int:
        """The gradient's size S in bytes."""
        return sum(p.nbytes for _, p in self.trainable)

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

    def replica(self, has_sparse_embeddings: bool = False) -> nn.Module:
        """A model with its own gradients and hooks, whose weights share memory with all other replicas'.

        So several candidates can stay attached without a copy of the weights for each. Its large embeddings may have
        sparse gradients.
        """
        shared: dict[int, torch.Tensor] = {
            id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in self.model.parameters()
        }
        shared |= {id(buffer): buffer for buffer in self.model.buffers()}
        replica = copy.deepcopy(self.model, shared)
        large = set(large_embeddings(replica, LEAST_BYTES)) if has_sparse_embeddings else set()
        for module in replica.modules():
            if isinstance(module, nn.Embedding) and module.weight in large:
                module.sparse = True
        return replica


class Stepper:
    """Clipping and AdamW for all replicas, with one AdamW state.

    The learning rate is 0. The work is the same but the weights do not change, so that no candidate's average (or the
    floor's lack of one) changes what the others compute.
    """

    def __init__(self, model: nn.Module):
        config = RunConfig(learning_rate=0.0)
        self._max_grad_norm = config.max_grad_norm
        self._parameters = list(model.parameters())
        self._optimizer = make_optimizer(model, config)
        # torch's fused AdamW does not accept sparse gradients, and it moves all rows, by momentum: mostly zeros.
        self._dense: dict[nn.Parameter, torch.Tensor] = {}

    def clip(self, replica: nn.Module) -> None:
        """Clip the replica's gradients. Of sparse ones the values are clipped, after duplicate rows are added up."""
        if not any(p.grad is not None and p.grad.is_sparse for p in replica.parameters()):
            torch.nn.utils.clip_grad_norm_(replica.parameters(), self._max_grad_norm)
            return
        values = values_of(replica.parameters())
        norm = torch.nn.utils.get_total_norm(values)
        torch._foreach_mul_(values, (self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0))

    def step(self, replica: nn.Module) -> None:
        """One step with the replica's gradients."""
        looked_up = []
        for own, other in zip(self._parameters, replica.parameters(), strict=True):
            own.grad = other.grad
            if own.grad is not None and own.grad.is_sparse:
                if own not in self._dense:
                    self._dense[own] = torch.zeros_like(own)
                dense, rows = self._dense[own], own.grad.indices()[0]
                dense[rows] = own.grad.values()
                looked_up.append((dense, rows))
                own.grad = dense
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for dense, rows in looked_up:
            dense[rows] = 0


def values_of(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """The values of the gradients: dense ones, and those of sparse ones after duplicate rows are added up."""
    found = []
    for p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.coalesce()
            found.append(p.grad.values())
        elif p.grad is not None:
            found.append(p.grad)
    return found
