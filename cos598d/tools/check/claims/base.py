"""The two sides of a claim: the tools of its observation on a rank, and its judgement in the grader."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cos598d.comm.ledger import Ledger
from cos598d.sync.base import GradientSync
from cos598d.sync.options import DEFAULTS, SyncOptions
from cos598d.terminal.printable import printable
from cos598d.tools.check.comparison import Comparison, Gradients, Local, difference
from cos598d.tools.check.diagnosis import Symptom, symptom_of
from cos598d.tools.check.evidence import BadEvidence, Evidence, Tensors
from cos598d.tools.check.noting import NotingCommunicator
from cos598d.tools.check.toy import SMALL, Shape, ToyModel, local_batch, toy_model

MakeSync = Callable[..., GradientSync]  # called with a communicator and, if needed, find_unused_parameters and options

# Ways of cutting buckets: the default, almost one per tensor, one for all.
BUCKETS = {
    "": DEFAULTS,
    "tiny buckets": SyncOptions(bucket_mb=64 / 2**20, first_bucket_mb=32 / 2**20),
    "one bucket": SyncOptions(bucket_mb=1e6, first_bucket_mb=1e6),
}
FEW_STEPS = 2
NOT_HANDED_IN = "a rank did not hand in what it was asked for"


class NotAsAgreed(Exception):
    """On a rank: the sync did something that makes it impossible to continue."""


class Claim:
    """A requirement for a sync. `observe(OnRank)` drives it on a rank and hands in the results. `judge(World)` runs
    where no student's code runs, and finds what is wrong."""

    judge: Callable[["World"], None]

    def __init__(self, observe: Callable[[Any], None]):
        self.name, self.says, self.observe = observe.__name__, observe.__doc__ or "", observe

    def judgement(self, judge: Callable[["World"], None]) -> None:
        """A decorator for the other side."""
        self.judge = judge


class OnRank:
    """One rank's side of one claim."""

    def __init__(self, claim: str, make_sync: MakeSync, comm: NotingCommunicator, evidence: Evidence, folder: Path):
        self.comm, self.rank, self.world_size, self.folder = comm, comm.rank, comm.world_size, folder
        self._claim, self._make_sync, self._evidence = claim, make_sync, evidence
        self.nonce = evidence.nonce
        self._labels = list(BUCKETS) if "bucket_mb" in getattr(make_sync, "uses", ()) else [""]

    def model(self, shape: Shape = SMALL, differs: bool = False) -> ToyModel:
        """The trial's model; with `differs` each rank has other weights, until attach."""
        return toy_model(self._evidence.nonce + (self.rank if differs else 0), shape)

    def batch(self, step: int, with_first_label: bool = True) -> dict[str, torch.Tensor]:
        """The batch of this rank, seen by no other, in `step`."""
        return local_batch(self.rank, step, with_first_label, self._evidence.nonce)

    def sync(self, **options: Any) -> GradientSync:
        """The sync under test, with this world's communicator."""
        return self._make_sync(self.comm, **options)

    def attached(self, model: nn.Module, **options: Any) -> tuple[GradientSync, nn.Module]:
        """The sync, attached to the model, and the module to call."""
        sync = self.sync(**options)
        module = sync.attach(model)
        if not callable(module):
            raise NotAsAgreed(f"attach returned {module!r}, but should return the module to call instead of the model")
        return sync, module

    def buckets(self) -> Iterator[tuple[str, SyncOptions]]:
        """Each way of cutting buckets that has an effect on the sync, with its label."""
        self.report("buckets", self._labels)
        for label in self._labels:
            yield label, BUCKETS[label]

    def fresh_ledger(self) -> Ledger:
        """A new ledger for the following calls."""
        self.comm.ledger = Ledger()
        return self.comm.ledger

    def hand_in(self, moment: str, tensors: Tensors) -> None:
        """Hand in the current values of these tensors."""
        self._evidence.put(self._claim, moment, tensors)

    def hand_in_gradients(self, moment: str, model: nn.Module) -> None:
        """Hand in every parameter's .grad."""
        self.hand_in(moment, {name: p.grad for name, p in model.named_parameters()})

    def step(
        self,
        sync: GradientSync,
        module: nn.Module,
        model: nn.Module,
        moment: str,
        *batches: int,
        with_first_label: bool = True,
    ) -> None:
        """A step with one backward pass per batch. Hand in the resulting .grads, and reset them."""
        for number in batches:
            module(**self.batch(number, with_first_label))[0].backward()
        sync.finish()
        self.hand_in_gradients(moment, model)
        model.zero_grad(set_to_none=True)

    def report(self, name: str, value: Any) -> None:
        """Hand in a value (JSON)."""
        self._evidence.report(self._claim, name, value)


@dataclass(frozen=True)
class Finding:
    """A fault on one rank. `cause` is its reason, if that is known without comparisons.

    `is_compared`: it comes from a comparison, whose numbers may show the reason. `line` of the file under test is 0 if
    it is not known. `at` is the function there that it is about, such as "LossScaler.step"; "" if it is not known.
    """

    rank: int
    message: str
    cause: str = ""
    is_compared: bool = False
    line: int = 0
    at: str = ""


@dataclass
class World:
    """The grader's side of one claim at one world size: what the ranks handed in, and its findings."""

    claim: str
    nonce: int
    evidence: Sequence[Evidence]
    findings: list[Finding] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    symptom: Symptom | None = None  # what the comparisons show
    is_broken: bool = False  # whether what was handed in cannot be judged

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.evidence)

    def judge(self, claim: Claim) -> None:
        """Let the claim judge what the ranks handed in, and find out what the comparisons show.

        Invalid data from the ranks is not the grader's fault. Then the only finding is why it is no evidence.
        """
        try:
            claim.judge(self)
            self.symptom = symptom_of(self.comparisons)
            return
        except BadEvidence as error:
            message, cause = printable(error), NOT_HANDED_IN
        except Exception as error:
            why = f"{type(error).__name__}: {printable(str(error), 100)}"
            message = cause = f"what the ranks handed in cannot be judged ({why})"
        self.findings, self.comparisons, self.is_broken = [Finding(0, message, cause)], [], True

    def model(self, shape: Shape = SMALL) -> ToyModel:
        """Rank 0's model before it trains."""
        return toy_model(self.nonce, shape)

    def local(self, steps: Sequence[int], users: set[int] | None = None, shape: Shape = SMALL) -> Local:
        """The ranks' own gradients of `steps`; `sometimes` is used on `users`, by default on all ranks."""
        ranks = range(self.size)
        return Local(
            [
                [_own_gradients(self.nonce, rank, step, users is None or rank in users, shape) for rank in ranks]
                for step in steps
            ]
        )

    def reported(self, name: str, kind: type) -> list[Any]:
        """Each rank's value under this name, of that type."""
        return [each.reported(self.claim, name, kind) for each in self.evidence]

    def handed_in(self, moment: str, like: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor | None]]:
        """What each rank handed in at this moment, with the shapes and dtypes of `like`."""
        return [each.get(self.claim, moment, like) for each in self.evidence]

    def labels(self) -> list[str]:
        """The ways of cutting buckets that were tested."""
        by_rank = self.reported("buckets", list)
        for rank, labels in enumerate(by_rank):
            if labels not in ([""], list(BUCKETS)):
                raise BadEvidence(f"rank {rank} did not report buckets")
        return by_rank[0]

    def gradients_are(self, moment: str, local: Local, run: str = "", step: int = 0, shape: Shape = SMALL) -> None:
        """Compare every element of every gradient, on all ranks, with the mean over ranks."""
        found = self.handed_in(moment, dict(self.model(shape).named_parameters()))
        self.compare(Comparison(run, step, local, found, local.mean), moment)

    def compare(self, comparison: Comparison, moment: str = "") -> None:
        """Keep the comparison, and find for each rank the tensor with the largest error."""
        self.comparisons.append(comparison)
        found, right = comparison.found, comparison.right
        for rank, names in enumerate(comparison.wrong):
            if names:
                worst = max(names, key=lambda name: difference(found[rank][name], right[name]))
                words = _wrong_gradient(worst, found[rank][worst], right[worst], moment)
                self.findings.append(Finding(rank, words, is_compared=True))

    def equals(self, moment: str, right: Mapping[str, torch.Tensor], sentence: str, cause: str = "") -> None:
        """Find tensors that are not bit for bit the `right` ones; {name} in the sentence is the first of them."""
        for rank, found in enumerate(self.handed_in(moment, right)):
            off = [name for name, tensor in right.items() if not _same(found[name], tensor)]
            if off:
                self.find(rank, sentence.format(name=off[0]), cause.format(name=off[0]))

    def require(self, holds: bool, message: str, rank: int = 0, cause: str = "", at: str = "") -> None:
        """Add the finding `message` unless it `holds`."""
        if not holds:
            self.find(rank, message, cause, at=at)

    def find(self, rank: int, message: str, cause: str = "", line: int = 0, at: str = "") -> None:
        """Add a finding on `rank`, with a line of the file under test or the function `at` which it is."""
        self.findings.append(Finding(rank, message, cause, line=line, at=at))


@functools.lru_cache(maxsize=512)
def _own_gradients(nonce: int, rank: int, step: int, with_first_label: bool, shape: Shape) -> Gradients:
    model = toy_model(nonce, shape)
    model(**local_batch(rank, step, with_first_label, nonce))[0].backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _wrong_gradient(name: str, found: torch.Tensor | None, right: torch.Tensor | None, moment: str) -> str:
    if found is None or right is None:
        has, should = (f"{'no' if gradient is None else 'a'} gradient" for gradient in (found, right))
        return f"{name} has {has} and should have {should} ({moment})"
    return f"{name}'s gradient is off the mean over ranks by {difference(found, right):.1e} ({moment})"


def _same(found: torch.Tensor | None, right: torch.Tensor) -> bool:
    return found is not None and torch.equal(found, right)


def moment_of(run: str, step: int) -> str:
    """The name of a run's step."""
    return ", ".join(part for part in (run, f"step {step}") if part)


def first_few(names: list) -> str:
    """The first three as text, and how many more there are."""
    return ", ".join(map(str, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
