"""torch's DataParallel: one process that copies the model to all of its GPUs in every step."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from cos598d.errors import UsageError
from cos598d.records.conventions import BY_COUNTERS
from cos598d.sync.none import NoSync


class DP(NoSync):
    """`nn.DataParallel` on g GPUs of one host, with threads of one process (torch's module of that name).

    1. Forward copies the weights from the first GPU to the others and splits the batch into g pieces, equal except the
       last.
    2. Each GPU computes its piece. The losses return to the first GPU, where they are weighted by the number of
       examples.
    3. Backward runs on all GPUs and adds the gradients up on the first, where the optimizer steps.

    Cost for S bytes of weights, between the host's GPUs: in every forward and backward the first GPU sends (g-1) S of
    weights and receives (g-1) S of gradients, of which the ledger knows nothing. Memory: 4 S on the first GPU with
    AdamW, 2 S on each other. Never choose it: `ddp` on as many ranks is faster, because its copies stay and no thread
    waits for another's Python. With one GPU or none it only calls the module, and measures nothing of its own.
    """

    bytes_from = BY_COUNTERS

    @classmethod
    def check_run(cls, ranks: int, precision: str) -> None:
        if ranks > 1:
            raise UsageError(
                f"--sync dp uses one process with all of its GPUs, not {ranks} ranks. Give --world_size 1, or choose "
                "--sync ddp."
            )

    def attach(self, model: nn.Module) -> Callable:
        call = super().attach(model)
        if self.device.type != "cuda" or torch.cuda.device_count() < 2:
            return call
        parallel = nn.DataParallel(_Sum(call))
        return lambda **inputs: (parallel(**inputs).sum() / _examples(inputs), None)


class _Sum(nn.Module):
    """The sum of a model's losses, in the form that DataParallel gathers."""

    def __init__(self, module: Callable):
        super().__init__()
        self.module = module

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """The model's mean loss times the number of examples, (1,)."""
        return (self.module(**inputs)[0] * _examples(inputs)).reshape(1)


def _examples(inputs: Mapping[str, torch.Tensor]) -> int:
    return len(next(iter(inputs.values())))
