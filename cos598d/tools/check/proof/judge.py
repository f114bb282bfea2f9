"""Which results are right among those that the ranks of a proof handed in, and how far off the others are."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cos598d.terminal.printable import printable
from cos598d.tools.check.evidence import BadEvidence, Evidence
from cos598d.tools.check.proof.cases import (
    BUFFERS,
    MEMORY,
    OVERFLOW,
    START,
    Case,
    Reference,
    Training,
    Weights,
    reference,
)
from cos598d.tools.check.proof.model import proof_model
from cos598d.tools.check.proof.observe import CUT, FINISHED, HELD, REFUSAL, SEEN, UNCLAIMED
from cos598d.tools.check.verdict import KEPT, NOT_CLAIMED, REFUSED, WRONG

# Relative to one process: the most that all ranks together may hold of sharded state. Parts are cut to whole elements,
# rows or parameters, and an optimizer has step counters in addition.
SHARED_ONCE = 1.25
# And the least that all together must have, if it is counted at all.
HELD_ONCE = 0.99
HALF, FEW = {"bf16": torch.bfloat16, "fp16": torch.float16}, 4


@dataclass(frozen=True)
class CaseVerdict:
    """The outcome of a case on a number of ranks. `largest`: the largest difference, of its tensor's largest value."""

    status: str
    says: str = ""
    largest: float = 0.0

    def details(self) -> dict[str, Any]:
        """Its other fields in JSON."""
        return {"largest": self.largest, "says": self.says}


@dataclass(frozen=True)
class _Difference:
    """Of one tensor: `size` relative to its largest value, and its constant factor to the right one, if any."""

    size: float
    rank: int
    name: str
    factor: float


def judge_case(case: Case, evidence: Sequence[Evidence]) -> CaseVerdict:
    """The outcome of the case. Raises BadEvidence if a rank has not handed in what the case needs."""
    refusals = [each.reported(case.name, REFUSAL, str) for each in evidence]
    if all(refusals):
        return _judge_before_refusal(case, evidence) or CaseVerdict(REFUSED, printable(refusals[0]))
    if any(refusals):
        rank = next(rank for rank, sentence in enumerate(refusals) if sentence)
        return CaseVerdict(WRONG, f"only some ranks refuse, such as rank {rank}: {printable(refusals[rank])}")
    unclaimed = [each.reported(case.name, UNCLAIMED, str) for each in evidence]
    if all(unclaimed):
        return CaseVerdict(NOT_CLAIMED, printable(unclaimed[0]))
    if case.looks_at == MEMORY:
        return _judge_memory(case, evidence)
    return _judge_trainings(case, case.trainings, evidence)


def _judge_before_refusal(case: Case, evidence: Sequence[Evidence]) -> CaseVerdict | None:
    """What is wrong with the trainings before a refused one, such as those with another optimizer."""
    before = [training for training in case.trainings if all(_has_finished(each, case, training) for each in evidence)]
    if not before or case.looks_at == MEMORY or any(each.reported(case.name, UNCLAIMED, str) for each in evidence):
        return None
    verdict = _judge_trainings(case, before, evidence)
    return verdict if verdict.status == WRONG else None


def _has_finished(evidence: Evidence, case: Case, training: Training) -> bool:
    try:
        return evidence.reported(case.name, f"{training.name}, {FINISHED}", bool)
    except BadEvidence:
        return False


def _judge_trainings(case: Case, trainings: Sequence[Training], evidence: Sequence[Evidence]) -> CaseVerdict:
    found = []
    for training in trainings:
        if case.looks_at == START:
            found.append(_compared(case, training, "start", {}, evidence, 0))
        elif case.looks_at == OVERFLOW:
            found.append(_judge_overflow(case, training, evidence))
        else:
            found.append(_judge_training(case, training, evidence))
    largest = max(each.largest for each in found)
    wrong = [(training, each) for training, each in zip(trainings, found, strict=True) if each.status == WRONG]
    if not wrong:
        return CaseVerdict(KEPT, "", largest)
    also = " and ".join(training.name for training, _ in wrong[1:])
    return CaseVerdict(WRONG, wrong[0][1].says + (f"; wrong too: {also}" if also else ""), largest)


def finished(evidence: Evidence) -> list[str]:
    """The cases that a rank reports as finished."""
    return [str(name) for name in evidence.reported("", FINISHED, list)]


def _judge_training(case: Case, training: Training, evidence: Sequence[Evidence]) -> CaseVerdict:
    right = reference(case, training, evidence[0].nonce)
    wrong = _wrong_losses(case, training, evidence, right.losses)
    start = right.weights[0] if training.gives_gradients else {}
    weights = _compared(case, training, "weights", start, evidence, training.steps)
    wrong = wrong or _rounded_weights(case, training, evidence, right) or _unsettled(case, training, evidence)
    if weights.status == WRONG or not wrong:
        return weights
    return CaseVerdict(WRONG, wrong, weights.largest)


def _unsettled(case: Case, training: Training, evidence: Sequence[Evidence]) -> str:
    """Which buffers differ, after settle, from rank 0's before it."""
    if case.looks_at != BUFFERS:
        return ""
    like = dict(proof_model(evidence[0].nonce, case.parts).named_buffers())
    right = evidence[0].get(case.name, f"{training.name}, before settle", like)
    for each in evidence:
        for name, found in each.get(case.name, f"{training.name}, after settle", like).items():
            expected = right[name]
            if expected is None or found is None or not torch.equal(found, expected):
                first = [None if tensor is None else tensor.flatten()[0].item() for tensor in (expected, found)]
                words = f"{training.name}: after settle the buffer {name} is not rank 0's on rank {each.rank}"
                return f"{words}: its first element should be {first[0]:.6g}, and is {first[1]:.6g}"
    return ""


def _rounded_weights(case: Case, training: Training, evidence: Sequence[Evidence], right: Reference) -> str:
    """Which weights have lost their last bits. An engine in half precision must keep its weights in single precision,
    or it would lose many small steps."""
    half = HALF.get(case.precision)
    if half is None:
        return ""
    start, end = right.weights[0], right.weights[training.steps]
    for each in evidence:
        for name, tensor in each.get(case.name, f"{training.name}, weights", end).items():
            is_stepped = not torch.equal(start[name], end[name])
            # A few elements that all lack last bits by chance have not been seen.
            if (
                tensor is not None
                and is_stepped
                and tensor.numel() >= FEW
                and torch.equal(tensor, tensor.to(half).float())
            ):
                return f"{training.name}: the weight {name} is rounded to {case.precision} on rank {each.rank}"
    return ""


def _wrong_losses(case: Case, training: Training, evidence: Sequence[Evidence], right: Sequence[float]) -> str:
    by_rank = []
    for each in evidence:
        losses = each.reported(case.name, f"{training.name}, losses", list)
        if len(losses) != len(right) or not all(isinstance(loss, float) for loss in losses):
            raise BadEvidence(f"rank {each.rank} did not report a loss for each step")
        by_rank.append(losses)
    for number, expected in enumerate(right):
        total = math.fsum(losses[number] for losses in by_rank)
        if not abs(total - expected) <= case.tolerance * abs(expected):
            return f"{training.name}: the loss of step {number + 1} is {total:.6g} and should be {expected:.6g}"
    return ""


def _compared(
    case: Case, training: Training, moment: str, start: Weights, evidence: Sequence[Evidence], step: int
) -> CaseVerdict:
    """Weights, or with `start` their change since then, compared with one process's after `step` steps."""
    after = reference(case, training, evidence[0].nonce).weights[step]
    differences = []
    for each in evidence:
        handed_in = each.get(case.name, f"{training.name}, {moment}", after)
        found, right = ({}, {})
        for name, tensor in after.items():
            held = handed_in[name]
            if held is None:
                raise BadEvidence(f"rank {each.rank} did not hand in {name} ({moment})")
            begun = start.get(name, torch.zeros_like(tensor))
            found[name], right[name] = (begun - held).double(), (begun - tensor).double()
        differences += _differences(each.rank, found, right)
    worst = max(differences, key=lambda difference: difference.size)
    if worst.size <= case.tolerance:
        return CaseVerdict(KEPT, "", worst.size)
    what = "gradient" if start else "weight"
    off = [d for d in differences if d.rank == worst.rank and d.size > case.tolerance]
    words = f"{training.name}: the {what} {worst.name} is off by {_share(worst.size)} of its largest element"
    words += f" on rank {worst.rank}" if len({d.rank for d in differences if d.size > case.tolerance}) == 1 else ""
    factors = [d.factor for d in off]
    if start and all(math.isfinite(factor) for factor in factors) and max(factors) - min(factors) < 1e-2 * max(factors):
        times = f"{sum(factors) / len(factors):.3g} times what it should be"
        words += f": it is {times}" if len(off) == 1 else f": it and {len(off) - 1} more are {times}"
    elif len(off) > 1:
        words += f", and {len(off) - 1} more of {len(after)} are wrong"
    return CaseVerdict(WRONG, words, worst.size)


def _differences(rank: int, found: Weights, right: Weights) -> list[_Difference]:
    differences = []
    for name, expected in right.items():
        largest, off = expected.abs().max().item(), (found[name] - expected).abs().max().item()
        size = off / largest if off and largest else math.inf if off else 0.0
        size = size if math.isfinite(size) else math.inf
        factor = math.nan
        if math.isfinite(size) and size:
            factor = ((found[name] * expected).sum() / expected.square().sum()).item()
            if (found[name] - factor * expected).abs().max().item() > 1e-3 * largest * max(1.0, abs(factor)):
                factor = math.nan
        differences.append(_Difference(size, rank, name, factor))
    return differences


def _judge_overflow(case: Case, training: Training, evidence: Sequence[Evidence]) -> CaseVerdict:
    for each in evidence:
        counted = each.reported(case.name, f"{training.name}, counted", list)
        expected = [number != case.overflows_in for number in range(training.steps)]
        if counted != expected:
            words = f"{training.name}: on rank {each.rank} the steps that count are {json.dumps(counted)}"
            return CaseVerdict(WRONG, f"{words}, and should be {json.dumps(expected)}")
    steps = [_compared(case, training, f"step {n}", {}, evidence, n) for n in range(1, training.steps + 1)]
    for number, step in enumerate(steps, 1):
        if step.status == WRONG:
            return CaseVerdict(WRONG, f"after step {number}, {step.says}", step.largest)
    return CaseVerdict(KEPT, "", max(step.largest for step in steps))


def _judge_memory(case: Case, evidence: Sequence[Evidence]) -> CaseVerdict:
    (training,) = case.trainings
    right = reference(case, training, evidence[0].nonce)
    weights = sum(tensor.nbytes for tensor in right.weights[0].values())
    whole = {"parameters": weights, "gradients": right.gradient_bytes, "optimizer": right.state_bytes}
    spare = {"optimizer": weights}  # some engines' optimizers keep a copy of the weights that they step
    cut = evidence[0].reported(case.name, f"{training.name}, {CUT}", list)
    largest = 0.0
    for category in cut:
        held = 0
        for each in evidence:
            by_category = dict(each.reported(case.name, f"{training.name}, {HELD}", list))
            mine = by_category.get(category)
            if category not in whole or type(mine) is not int:
                raise BadEvidence(f"rank {each.rank} did not report how many bytes it holds of {category}")
            seen = dict(each.reported(case.name, f"{training.name}, {SEEN}", list)).get(category, 0)
            if seen > mine:
                return CaseVerdict(
                    WRONG, f"rank {each.rank} counts {mine} bytes of {category}, and {seen} can be seen there"
                )
            held += mine
        largest = max(largest, held / whole[category])
        if held > SHARED_ONCE * (whole[category] + spare.get(category, 0)):
            times = f"{held / whole[category]:.2f} times"
            return CaseVerdict(WRONG, f"the ranks together hold {category} {times}, {held} bytes for {whole[category]}")
        if held < HELD_ONCE * whole[category]:
            return CaseVerdict(
                WRONG, f"the ranks count {held} bytes of {category} together, and {whole[category]} are needed"
            )
    return CaseVerdict(KEPT, f"{', '.join(cut)} held {largest:.2f} times by all ranks together")


def _share(size: float) -> str:
    return f"{size:.1e}" if math.isfinite(size) else "more than can be said"
