"""The parts of a lesson's checks: a claim, the numbers of ranks that it is tried on, and the lesson's own texts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from cos598d.tools.check.claims.base import Claim, MakeSync, OnRank
from cos598d.tools.check.evidence import Evidence
from cos598d.tools.learn.comm import LessonCommunicator
from cos598d.tools.learn.events import to_rows


class OnLesson(OnRank):
    """One rank's side of one check: as a claim's, with the student's module, and with a record of what it does."""

    comm: LessonCommunicator

    def __init__(
        self,
        claim: str,
        student: ModuleType,
        make_sync: MakeSync,
        comm: LessonCommunicator,
        evidence: Evidence,
        folder: Path,
    ):
        super().__init__(claim, make_sync, comm, evidence, folder)
        self.student = student

    def report_events(self, name: str = "events") -> None:
        """Report to the grader what this rank did since `begin_record`."""
        self.report(name, to_rows(self.comm.events))


@dataclass(frozen=True)
class Check:
    """A claim about a lesson's file, tried on worlds of these `sizes`.

    `about` is the name in the lesson's contract that it is about; "" for the first. `only` are the kinds of calls that
    the file may make in it; () for any.
    `words` are the lesson's own for a kind of wrong gradients (the kinds: `cos598d/tools/check/diagnosis/symptom.py`).
    """

    claim: Claim
    sizes: tuple[int, ...] = (2, 3)
    words: Mapping[str, str] = field(default_factory=dict)
    about: str = ""
    only: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The claim's name."""
        return self.claim.name


@dataclass(frozen=True)
class Golf:
    """What is measured, in words; the check that measures it, on one number of ranks; and the least bytes that a rank
    sends in a step, on the mean over the ranks, by the lesson's formula."""

    what: str
    check: Check
    least: int

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.check.sizes[0]


@dataclass(frozen=True)
class Checks:
    """All checks of a lesson, in the order in which they are printed; and what makes a sync of the student's module.

    `record` runs on every rank and reports the events of a picture. `golf` is what is measured of a file that passes;
    None: the lesson has no board. `calls_torch`: the file may call torch.distributed itself, as scripts do.
    `without_file` are ranks that never load the file, so that it cannot read their values.
    """

    checks: tuple[Check, ...]
    make_sync: Callable[[ModuleType], MakeSync] | None = None
    record: Claim | None = None
    calls_torch: bool = False
    without_file: tuple[int, ...] = ()
    golf: Golf | None = None

    @property
    def sizes(self) -> list[int]:
        """All numbers of ranks that the checks are tried on, in their order."""
        return list(dict.fromkeys(size for check in self.checks for size in check.sizes))

    @property
    def least(self) -> int:
        """The least bytes that a rank sends in a step of golf, on the mean; 0 without golf."""
        return self.golf.least if self.golf else 0

    def sync_of(self, student: ModuleType) -> MakeSync:
        """The function that makes a sync of the student's module; for lessons without a sync it raises an error."""
        return self.make_sync(student) if self.make_sync else _no_sync


def _no_sync(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("this lesson's file is no gradient sync")


def record_steps(
    on: OnLesson,
    model: nn.Module,
    loss_of: Callable[[nn.Module, int], torch.Tensor],
    after: Callable[[int], None] = lambda step: None,
    **options: Any,
) -> None:
    """Record a step after a first one, with backward gradient by gradient, and report it.

    `loss_of` is called with the module and the step, `after` with the step once it is averaged. `options` are the
    sync's.
    """
    handles = [
        p.register_post_accumulate_grad_hook(lambda _, name=name: on.comm.computed(f"backward of {name}", name))
        for name, p in model.named_parameters()
        if p.requires_grad
    ]
    # Hooks of its own, which a sync registers from here on, find the computing of their gradient recorded.
    sync, module = on.attached(model, **options)
    for step in range(2):
        # All begin together, so that the picture shows who waits for whom within the step.
        on.comm.exchange(step)
        on.comm.begin_record()
        loss = loss_of(module, step)
        on.comm.computed("forward")
        loss.backward()
        on.comm.computed("backward")
        sync.finish()
        after(step)
        model.zero_grad(set_to_none=True)
    for handle in handles:
        handle.remove()
    on.report_events()
