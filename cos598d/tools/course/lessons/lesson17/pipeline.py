"""Lesson 17, second part: a pipeline's stages, what a rank does with a student's pipeline, and its time in units."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from cos598d.tools.exam.notes import Trace

WIDTH = 6
FORWARD, BACKWARD = "forward", "backward"
Computed = list[tuple[str, float]]  # what was computed, and when it was over


class Stage(nn.Module):
    """One rank's layers of a pipeline, which notes every forward and backward of a micro-batch."""

    def __init__(self, seed: int, rank: int):
        super().__init__()
        draw = torch.Generator().manual_seed(seed + 1000 + rank)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=draw))
        self.bias = nn.Parameter(torch.randn(WIDTH, generator=draw))
        self.computed: Computed = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(rows, width) to (rows, width)."""
        outputs = torch.tanh(NotedUnit.apply(inputs, self.note) @ self.weight + self.bias)
        self.note(FORWARD)
        return outputs

    def note(self, what: str) -> None:
        """A micro-batch was computed here."""
        self.computed.append((what, time.perf_counter()))


class NotedUnit(torch.autograd.Function):
    """Notes when the backward of a micro-batch has come to a stage's inputs."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, note: Callable[[str], None]) -> torch.Tensor:
        """The inputs, unchanged."""
        ctx.note = note
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """The gradient, unchanged."""
        ctx.note(BACKWARD)
        return gradients[0], None


def micro_batches(seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Inputs, which require a gradient, and targets of each micro-batch: 3 to 6 of them, of 2 to 4 rows."""
    draw = torch.Generator().manual_seed(seed + 2000)
    count, rows = (int(torch.randint(*between, (), generator=draw)) for between in ((3, 7), (2, 5)))
    inputs, targets = torch.randn(2, count, rows, WIDTH, generator=draw)
    return [each.clone().requires_grad_() for each in inputs], [*targets]


def run_pipeline(comm: Any, module: Any, seed: int) -> dict[str, Any]:
    """On a rank: a student's pipeline's losses, the gradients of its stage and of the inputs, and what was computed."""
    stage, (inputs, targets) = Stage(seed, comm.rank), micro_batches(seed)
    is_first, is_last = comm.rank == 0, comm.rank == comm.world_size - 1
    given = (inputs if is_first else None, targets if is_last else None)
    returned = module.pipeline(comm, stage, *given, functional.mse_loss, (len(inputs), *inputs[0].shape))
    losses = returned if isinstance(returned, list | tuple) else []
    gradients = {f"micro-batch {k}'s inputs": each.grad for k, each in enumerate(inputs) if is_first}
    gradients |= {f"the stage's {name}": p.grad for name, p in stage.named_parameters()}
    return {"losses": [float(each) for each in losses], "gradients": gradients, "computed": stage.computed}


def units_of_time(traces: Sequence[Trace], computed: Sequence[Computed]) -> int:
    """How long a step takes by its order alone: a forward or backward of a micro-batch is one unit, a message none."""
    left: list[list[tuple[float, str, int]]] = []
    for trace, units in zip(traces, computed, strict=True):
        # What is sent is complete when the send begins; all else counts when it is over.
        events = [(each.start if each.op == "send" else each.end, each.op, each.peer or 0) for each in trace.calls]
        left.append(sorted([*events, *((moment, "unit", 0) for _, moment in units)]))
    clock, on_the_way = [0] * len(left), defaultdict[tuple[int, int], list[int]](list)
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, own in enumerate(left):
            while own:
                _, op, peer = own[0]
                queue = on_the_way[peer, rank]
                if op == "recv" and not queue:
                    break
                if op == "recv":
                    clock[rank] = max(clock[rank], queue.pop(0))
                elif op == "send":
                    on_the_way[rank, peer].append(clock[rank])
                elif op == "unit":
                    clock[rank] += 1
                own.pop(0)
                has_moved = True
    return max(clock)
