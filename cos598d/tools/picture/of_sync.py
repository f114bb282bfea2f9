"""One step of a sync on real ranks, to be drawn: the calls of a small model, and the messages of one tensor."""

from typing import Any

import torch
from torch import nn

from cos598d.comm.dispatcher import DispatchedCall, listening
from cos598d.comm.ledger import Ledger
from cos598d.errors import UserError
from cos598d.tools.check.driving import file_of, noted, second_step, wrap
from cos598d.tools.exam.notes import LessonComm, Trace
from cos598d.tools.exam.ranks import Wrong, run
from cos598d.tools.picture.steps import BASE, MOST_RANKS, Look, look_at, read_looks

ELEMENTS = 840  # divided by every number of ranks up to 8


def calls_of(name: str, ranks: int) -> list[Trace]:
    """What each rank called in the second step of a small model. Raises UserError for a sync that fails."""
    world = _run(ranks, second_step, name)
    return [Trace(trace.calls[value["begun"] :]) for trace, value in zip(world.traces, world.values, strict=True)]


def looks_of(name: str, ranks: int) -> list[list[Look]]:
    """What each rank holds of one gradient between its messages; [] for a sync that sends none."""
    if ranks > MOST_RANKS:
        return []
    looks = [read_looks(value) for value in _run(ranks, look_between, name).values]
    return looks if any(len(mine) > 1 for mine in looks) else []


class One(nn.Module):
    """One tensor, whose gradient is a number of the rank's own in every element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ELEMENTS, dtype=torch.float64))

    def forward(self, number: float) -> torch.Tensor:
        """The loss, whose gradient is the number."""
        return (self.weight * number).sum()


def look_between(comm: LessonComm, module: Any, name: str) -> list[dict[str, Any]]:
    """On a rank: what it holds when it begins to receive, and at the end.

    A sync may send from a buffer, where the sum then grows: the memory of a message's tensor, if that is as long as the
    gradient.
    """
    model, ledger, found, sent = One(), Ledger(), [], dict.fromkeys(range(comm.world_size), 0)
    buffer: list[torch.Tensor] = []
    held: list[float] = []

    def before(call: DispatchedCall) -> None:
        """Look before the call: as soon as a rank receives, the message may be there."""
        gradient = model.weight.grad
        if call.op not in ("send", "recv") or gradient is None:
            return
        memory = call.tensors[0].untyped_storage()
        if call.tensors[0].dtype == gradient.dtype and memory.nbytes() == gradient.nbytes:
            buffer[:] = [torch.empty(0, dtype=gradient.dtype).set_(memory, 0, (ELEMENTS,), (1,))]
        held[:] = (buffer or [gradient])[0].tolist()

    def after(call: DispatchedCall) -> None:
        if call.op == "send":
            sent[call.root] += 1
        elif call.op == "recv" and held:
            found.append(look_at(held, call.root, sent, comm.world_size))

    with noted(comm, ledger), listening(after, before):
        wrapped = wrap(name, model, ledger, find_unused_parameters=False)
        wrapped(float(BASE**comm.rank)).backward()
    assert model.weight.grad is not None
    return [*found, look_at(model.weight.grad.tolist(), -1, sent, comm.world_size)]


def _run(ranks: int, function: Any, name: str) -> Any:
    try:
        return run(ranks, function, name, file=file_of(name), loads=False, seconds=30)
    except Wrong as wrong:
        raise UserError(f"{name} cannot be drawn, because it fails: {wrong.words}. Run `check {name}`.") from None
