"""Faults of scale: which multiple of the average is applied, by the fits' factors and the losses' weights."""

import math
import operator
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cos598d.tools.audit.book import GRADIENT
from cos598d.tools.audit.judge.fit import INDISTINCT, MEAN, NEAR, NOTHING
from cos598d.tools.audit.judge.gradients import (
    Fits,
    StepFits,
    calls_of,
    gradient_place,
    have_own_samples,
    named,
    near,
    step_place,
)
from cos598d.tools.audit.judge.verdict import AuditFinding, where

Judged = tuple[list[AuditFinding], list[str]]
_CONSTANT = 2e-3  # relative: factors of several steps that differ by less are one, and no clip's
_CONSTANT_ROUNDED = 1e-2
_FAR = 10**9
_TWO = 2  # ranks: there half a loss and a loss divided by the ranks look the same


@dataclass(frozen=True)
class _Scaled:
    """A step's factor: `factor` times the average is applied, without the effect of torch's clip.

    `total` is the weight of all ranks' losses together, as a multiple of one mean over all `examples`; 0 if it is not
    known. `apart` are tensors with another factor, relative to the others'.
    """

    step: StepFits
    factor: float
    clip: float
    total: float
    examples: float
    are_sums: bool
    apart: Mapping[str, float]

    @property
    def micros(self) -> int:
        """The backward passes of the step."""
        return len(self.step.rows[0]["micro"])

    def comes_to(self, value: float) -> bool:
        """Whether what is applied is `value` times the gradient of the mean over all examples."""
        return self.total > 0 and near(self.factor * self.total, value)

    def comes_to_each(self, value: float) -> bool:
        """The same, if each micro-batch counts as a whole batch."""
        return self.micros > 1 and self.comes_to(value * self.micros)


def judge_scale(ranks: int, fits: Fits, names: Sequence[str], is_rounded: bool, gathers: bool) -> Judged:
    """What is wrong with the scale of these tensors' gradients, and what could not be judged.

    gathers: whether each step gathers what its loss is computed from. The scale may be that of a sum instead of a mean,
    of a mean of a mean, or another factor; or ranks scale one average differently.
    """
    steps: list[_Scaled] = []
    for step in fits.steps:
        by_rank = [_factors(of_rank, names) for of_rank in step.fits]
        by_rank_usual = [_usual(each.values()) for each in by_rank if each]
        if not by_rank_usual:
            continue
        usual = statistics.median(by_rank_usual)
        if max(by_rank_usual) - min(by_rank_usual) > NEAR * abs(usual):
            said = ", ".join(f"rank {rank} {_usual(each.values()):.3f}" for rank, each in enumerate(by_rank) if each)
            says = f"Step {step.iteration}: all ranks have the average, and apply different multiples of it: {said}."
            return [AuditFinding("different_gradients", (says,), step_place(fits))], []
        if usual:
            steps.append(_scaled(step, ranks, usual, by_rank))
    if not steps:
        return [], []
    if wrong := _of_the_loss(ranks, steps, gathers):
        return [wrong], []
    found, unjudged = _of_all(ranks, fits, steps, _CONSTANT_ROUNDED if is_rounded else _CONSTANT)
    if found:
        return found, []
    found, more = _of_some(ranks, fits, steps, len(names))
    return found, unjudged + more


def _factors(of_rank: Mapping, names: Sequence[str]) -> dict[str, float]:
    known = {name: of_rank[name] for name in names if name in of_rank}
    found = {name: each.factor for name, each in known.items() if each.kind in (MEAN, INDISTINCT)}
    return found | {name: 0.0 for name, each in known.items() if each.kind == NOTHING}


def _usual(factors: Iterable[float]) -> float:
    """The factor of most tensors; if several are as frequent, the nearest to 1."""
    groups: dict[int, list[float]] = {}
    for each in factors:
        groups.setdefault(round(math.log(each) / NEAR) if each > 0 else -_FAR, []).append(each)
    place = max(groups, key=lambda key: (len(groups[key]), -abs(key)))
    return statistics.median(groups[place])


def _scaled(step: StepFits, ranks: int, usual: float, by_rank: Sequence[Mapping[str, float]]) -> _Scaled:
    of_tensors: dict[str, list[float]] = {}
    for each in by_rank:
        for name, factor in each.items():
            of_tensors.setdefault(name, []).append(factor)
    ratios = {name: statistics.median(each) / usual for name, each in of_tensors.items()}
    clip = _clip_factor(step)
    micros = [micro for row in step.rows for micro in row["micro"]]
    are_sums = bool(micros) and all(micro["is_sum"] for micro in micros)
    weights = [micro["weight"] for micro in micros]
    counts = [micro["examples"] or micro["size"] for micro in micros]
    total = 0.0
    if None not in weights and (are_sums or not any(micro["is_sum"] for micro in micros)):
        total = sum(map(operator.mul, weights, counts) if are_sums else weights) / ranks
    apart = {name: ratio for name, ratio in ratios.items() if not near(ratio, 1)}
    return _Scaled(step, usual / clip, clip, total, sum(counts), are_sums, apart)


def _of_the_loss(ranks: int, steps: Sequence[_Scaled], gathers: bool) -> AuditFinding | None:
    """A multiple of the mean that the losses themselves have, where the collective averages rightly."""
    if not all(each.total and not each.are_sums and near(each.factor, 1) for each in steps):
        return None
    times = steps[0].total
    if near(times, 1) or not all(near(each.total, times) for each in steps):
        return None
    rows = [row for each in steps for row in each.step.rows]
    micros = [micro for row in rows for micro in row["micro"]]
    place, passes = where(micros[0]), steps[0].micros
    says = f"Step {steps[0].step.iteration}: the applied gradient is {times:.4g} times that of the mean loss over all "
    says += "ranks' examples."
    if all(near(micro["scaler"], times) for micro in micros):
        return AuditFinding("scale_left_in", (says, f"The scaler's factor is {times:g}."), place)
    are_multiplied = all(any(near(each, ranks) for each in micro["multiplied"]) for micro in micros)
    if are_multiplied and near(times, ranks):
        said = f"The loss is multiplied by {ranks}, the number of ranks."
        return None if gathers else AuditFinding("loss_times_ranks", (says, said), place)
    are_summed = passes > 1 and near(times, passes) and not any(micro["divided"] for micro in micros)
    if are_summed and all(map(have_own_samples, rows)):
        said = f"The losses of its {passes} micro-batches are each a mean, and none is divided."
        return AuditFinding("micro_batches_summed", (says, said), place)
    return None


def _of_all(ranks: int, fits: Fits, steps: Sequence[_Scaled], constant: float) -> Judged:
    """The fault that the factor of most tensors shows."""
    place = gradient_place(fits, steps[0].step)
    of = f"times the average of {ranks} ranks"
    for each in steps:
        says = f"Step {each.step.iteration}: the applied gradient is {each.factor * each.clip:.4g} {of}."
        if not each.total or near(each.factor, 1) or each.comes_to(1):
            continue
        if each.comes_to(ranks) or (near(each.factor, ranks) and not each.are_sums):
            if each.comes_to_each(1):
                why = f"a loss divided by {ranks} may be meant for the ranks, or for the backward passes of a step"
                return [], [f"gradients: whether their sum over the ranks is meant: {why}."]
            return [AuditFinding("summed", (says,), place)], []
    if all(_is_divided(each, ranks) for each in steps):
        first = steps[0]
        says = f"Step {first.step.iteration}: the applied gradient is {first.factor * first.clip:.4g} {of}"
        if near(first.factor, 1 / ranks) or near(first.total, 1):
            return [AuditFinding("averaged_twice", (f"{says}.",), place)], []
        says += f", and their losses come to {1 / ranks:.4g} of a mean over all examples."
        divided = first.step.rows[0]["micro"][0]["divided"]
        # The number of examples that a sum is divided by is no number of ranks.
        is_of_a_sum = first.are_sums and not any(near(number, ranks) for number in divided)
        if (ranks > _TWO or is_of_a_sum) and divided:
            by = " and by ".join(f"{number:.4g}" for number in divided)
            return [AuditFinding("averaged_twice", (says, f"The loss of rank 0 is divided by {by}."), place)], []
        # Half a squared error and `loss / world_size` on 2 ranks are the same numbers.
        why = f"the loss comes to {1 / ranks:.4g} of a mean, which may be meant. Audit it with --world_size 3 too"
        return [], [f"gradients: whether they are divided by the number of ranks twice: {why}."]
    return _other_factor(ranks, fits, steps, constant)


def _other_factor(ranks: int, fits: Fits, steps: Sequence[_Scaled], constant: float) -> Judged:
    if smaller := _smaller(steps):
        return [], [smaller]
    factors = [each.factor for each in steps]
    open_steps = [
        each for each in steps if not near(each.factor, 1) and not (each.comes_to(1) or each.comes_to_each(1))
    ]
    said = ", ".join(f"{each.factor * each.clip:.4g}" for each in open_steps)
    what = f"{said} times the average of {ranks} ranks is applied"
    if not open_steps:
        hidden = [each for each in steps if not each.total and _is_divided_outside(each.step, ranks)]
        why = f"the whole loss is divided by {ranks} or more, and its graph does not tell what it is a mean over"
        return [], [f"gradients: whether they are divided by the number of ranks twice: {why}."] if hidden else []
    is_constant = len(open_steps) == len(steps) and max(factors) - min(factors) <= constant * abs(max(factors, key=abs))
    if is_constant and len(steps) > 1 and all(each.total and not each.are_sums for each in steps):
        says = (
            f"In {len(steps)} of {fits.judged} judged steps the applied gradient is {factors[0]:.4g} times the average."
        )
        sum_of = f"That is the sum over {ranks} ranks, divided by {ranks / factors[0]:.4g}."
        return [AuditFinding("wrong_factor", (says, sum_of), gradient_place(fits, steps[0].step))], []
    if is_constant:
        why = "one step does not tell a clip from a factor" if len(steps) == 1 else "the losses' graph does not tell"
        return [], [f"gradients: their scale: {what}; whether it is meant {why}."]
    if max(factors) > 1 + NEAR:  # less in some steps than in others is a clip
        return [], [f"gradients: their scale: {what}, which no clip makes."]
    return [], []


def _smaller(steps: Sequence[_Scaled]) -> str:
    """A sentence about a step over fewer examples that is divided by another step's number of examples.

    Each example then counts as much in all steps, and the step is smaller. "" if there is no such step.
    """
    full = next((each for each in steps if each.comes_to(1)), None)
    if full is None or not all(each.examples for each in steps):
        return ""
    of_one = [each.factor * each.total / each.examples for each in steps]
    few = min(steps, key=lambda each: each.examples)
    if near(few.examples, full.examples) or not all(near(each, of_one[0]) for each in of_one):
        return ""
    said = f"{few.examples:g} examples in step {few.step.iteration} and {full.examples:g} in step "
    said += f"{full.step.iteration} are divided by the same number"
    return f"gradients: whether a step over fewer examples is to be smaller: {said}."


def _of_some(ranks: int, fits: Fits, steps: Sequence[_Scaled], count: int) -> Judged:
    """Tensors that have their own factor, while the others' factor is right."""
    names = dict.fromkeys(name for each in steps for name in each.apart)
    ratios = {name: [each.apart.get(name, 1.0) for each in steps] for name in names}
    summed = [name for name, each in ratios.items() if all(near(ratio, ranks) for ratio in each)]
    if summed:
        says = (
            f"To {len(summed)} of {count} tensors {ranks} times as much is applied as to the others: {named(summed)}."
        )
        return [AuditFinding("summed", (says,), gradient_place(fits, steps[0].step))], []
    odd = [name for name, each in ratios.items() if max(each) > 1 + NEAR or max(each) - min(each) <= NEAR]
    if not odd:
        return [], []  # clipped tensor by tensor
    what = f"to {len(odd)} of {count} tensors {ratios[odd[0]][0]:.4g} times as much is applied as to the others"
    return [], [f"gradients: {what}, which may be meant ({named(odd)})."]


def _is_divided(each: _Scaled, ranks: int) -> bool:
    part = 1 / ranks
    if each.comes_to(1):
        return False
    is_part = each.comes_to(part) or each.comes_to_each(part)
    return is_part or bool(each.total and not each.are_sums and near(each.factor, part))


def _is_divided_outside(step: StepFits, ranks: int) -> bool:
    """Whether a loss is divided by the number of ranks, or by a multiple of it."""
    for micro in step.rows[0]["micro"]:
        times = {1, len(step.rows[0]["micro"])}
        if any(near(number, ranks * each) for number in micro["divided"] for each in times):
            return True
    return False


def _clip_factor(step: StepFits) -> float:
    """The factor of clips by torch's function after the gradients were sent."""
    row = step.rows[0]
    calls = [each["event"] for each in calls_of(step, GRADIENT)]
    factor = 1.0
    for event in row["events"]:
        if event["kind"] != "clip" or event["how"] != "norm" or event["event"] < max(calls, default=0):
            continue
        if event["norm"]:
            factor *= min(1.0, event["limit"] / (event["norm"] + 1e-6))
    return factor
