"""What several lessons check: averages in .grad on every rank, and the calls and bytes that they took."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from cos598d.comm.ledger import Row
from cos598d.sync.base import GradientSync
from cos598d.tools.check.claims.base import Claim, MakeSync, World, moment_of
from cos598d.tools.check.toy import Shape
from cos598d.tools.learn.checking import OnLesson, record_steps

ALL_USED = Shape(all_used=True)
STEPS = 3
NEAR = 1e-5  # of the largest element


def tensorwise(student: ModuleType) -> MakeSync:
    """A sync that calls the student's `average(comm, gradient, name)` for each gradient."""

    class Tensorwise(GradientSync):
        def average(self, name: str, gradient: torch.Tensor) -> None:
            student.average(self.comm, gradient, name)

    return Tensorwise


@Claim
def averages(on: OnLesson) -> None:
    """After your code every .grad is the mean of all ranks' gradients, on every rank, step after step."""
    model = on.model(ALL_USED)
    sync, module = on.attached(model, find_unused_parameters=False)
    for step in range(STEPS):
        on.step(sync, module, model, moment_of("", step), step)
    on.hand_in("weights", dict(model.named_parameters()))


@averages.judgement
def _(world: World) -> None:
    weights = dict(world.model(ALL_USED).named_parameters())
    world.equals("weights", weights, "the weight {name} was changed: only its gradient may change")
    for step in range(STEPS):
        world.gradients_are(moment_of("", step), world.local([step], shape=ALL_USED), step=step, shape=ALL_USED)


def traffic(rows: Sequence[Row]) -> dict[str, int]:
    """The calls and bytes among the ledger's rows, whatever the file says that they are for."""
    return {
        "calls": len(rows),
        "sent": sum(row.bytes_sent for row in rows),
        "received": sum(row.bytes_received for row in rows),
    }


def trainable(world: World, shape: Shape = ALL_USED) -> dict[str, nn.Parameter]:
    """The tensors of the model whose gradients are to be averaged."""
    return {name: p for name, p in world.model(shape).named_parameters() if p.requires_grad}


def bytes_of(tensor: torch.Tensor) -> int:
    """A tensor's payload."""
    return tensor.numel() * tensor.element_size()


def size_of(tensors: dict[str, nn.Parameter]) -> int:
    """S: the bytes of all gradients together."""
    return sum(bytes_of(tensor) for tensor in tensors.values())


def traffic_claim(name: str, says: str, judge: Callable[[World, int, dict[str, int]], None]) -> Claim:
    """A claim about what `averages` took: `judge(world, rank, traffic)` is called for each rank's last step."""

    def observe(on: OnLesson) -> None:
        model = on.model(ALL_USED)
        sync, module = on.attached(model, find_unused_parameters=False)
        ledger = on.fresh_ledger()
        module(**on.batch(0))[0].backward()
        sync.finish()
        on.report("traffic", traffic(ledger.rows))

    observe.__name__, observe.__doc__ = name, says
    claim = Claim(observe)

    @claim.judgement
    def _(world: World) -> None:
        for rank, found in enumerate(world.reported("traffic", dict)):
            judge(world, rank, {key: count_of(found, key) for key in ("calls", "sent", "received")})

    return claim


def count_of(found: dict[str, Any], key: str) -> int:
    """A count that a rank reported; -1 where it is none."""
    value = found.get(key)
    return value if type(value) is int and value >= 0 else -1


@Claim
def record(on: OnLesson) -> None:
    """One step after a first one, recorded."""
    record_steps(on, on.model(ALL_USED), lambda module, step: module(**on.batch(step))[0], find_unused_parameters=False)


def furthest_off(found: torch.Tensor, right: torch.Tensor) -> str:
    """The element that is furthest off, in words: what it is, and what was expected."""
    place = int((found - right).abs().nan_to_num(float("inf")).argmax())
    return f"element {place} is {found.flatten()[place]:.6g}, expected {right.flatten()[place]:.6g}"


def mean_loss(model: nn.Module, weights: Mapping[str, Any], data: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The mean over (inputs, targets) of the mean squared error of the model with these weights."""
    model.load_state_dict(weights)
    with torch.no_grad():
        return torch.stack([nn.functional.mse_loss(model(inputs), targets) for inputs, targets in data]).mean().item()


def add_flat(parameters: Iterable[nn.Parameter], flat: torch.Tensor) -> None:
    """Add to each parameter its part of a tensor of all their elements, in order."""
    weights = list(parameters)
    for p, part in zip(weights, flat.split([p.numel() for p in weights]), strict=True):
        p.data += part.view_as(p)


def near(found: torch.Tensor | None, right: torch.Tensor, tolerance: float = NEAR) -> bool:
    """Whether they are equal up to `tolerance` of the largest element; NaN is near nothing."""
    return found is not None and bool((found - right).abs().max() <= tolerance * right.abs().max())
