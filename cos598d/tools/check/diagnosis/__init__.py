"""From gradients that are not the mean to the probable reason, and to where they are wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from cos598d.tools.check.comparison import Comparison, agrees
from cos598d.tools.check.diagnosis.hypotheses import symptom_on_rank
from cos598d.tools.check.diagnosis.symptom import (
    HALF,
    OF_HOLDERS,
    STEP_KINDS,
    UNKNOWN,
    Symptom,
    elements_of,
    sentence,
    steps_of,
    tensors_of,
)

__all__ = ["UNKNOWN", "Symptom", "sentence", "symptom_of"]
ROUNDED = 1e-2  # relative: factors of bf16 gradients that differ by less count as equal


def symptom_of(comparisons: Sequence[Comparison]) -> Symptom | None:
    """What the comparisons of one claim on one world show; None if everything is right."""
    wrong = [each for each in comparisons if any(each.wrong)]
    if not wrong:
        return None
    size = len(wrong[0].found)
    symptoms = []
    for run in dict.fromkeys(each.run for each in wrong):
        for each in [each for each in wrong if each.run == run][:4]:
            before = next((b for b in comparisons if b.run == run and b.step == each.step - 1), None)
            symptoms.append((_of_moment(each, before), each))
    symptom, which = _plainest(symptoms)
    parts = [elements_of(which), tensors_of(which), steps_of(comparisons)]
    if symptom.kind in ("missing", "filled", "shifted", "not sent back", "made finite", OF_HOLDERS):
        parts = []
    if symptom.kind == "left without":
        parts = parts[1:2]
    if symptom.kind in HALF or symptom.kind == "steps":
        parts = parts[1:]
    return Symptom(symptom.kind, size, symptom.numbers, "; ".join(part for part in parts if part))


def _plainest(symptoms: Sequence[tuple[Symptom, Comparison]]) -> tuple[Symptom, Comparison]:
    """The most informative of the symptoms of several moments."""
    for symptom, which in symptoms:
        # In its first step a running mean looks like a wrong divisor. So does clipping if the ranks' norms are similar.
        if symptom.kind in STEP_KINDS or symptom.kind == "clipped":
            return symptom, which
    # If only one rank has a gradient, a sum without division, and a gradient that is never sent, look like this too.
    kinds = {symptom.kind for symptom, _ in symptoms}
    if plainer := next((kind for kind in ("local", "scaled") if kind in kinds), ""):
        symptoms = [(replace(s, kind=plainer) if s.kind == OF_HOLDERS else s, which) for s, which in symptoms]
    factors = [symptom.numbers["factor"] for symptom, _ in symptoms if symptom.kind == "scaled"]
    if factors and max(factors) - min(factors) > ROUNDED * max(factors):
        return Symptom("rescaled", symptoms[0][0].world_size, {"least": min(factors), "most": max(factors)}), symptoms[
            0
        ][1]
    return next((pair for pair in symptoms if pair[0].kind != UNKNOWN), symptoms[0])


def _of_moment(comparison: Comparison, before: Comparison | None) -> Symptom:
    """What the gradients of one moment show, over all ranks; `before` is the previous step of the same run."""
    size = len(comparison.found)
    if _is_shifted(comparison):
        return Symptom("shifted", size)
    missing = _missing(comparison)
    if missing:
        return Symptom(missing, size)
    symptoms = [symptom_on_rank(comparison, before, rank) for rank, names in enumerate(comparison.wrong) if names]
    kinds = {symptom.kind for symptom in symptoms}
    right = [rank for rank, names in enumerate(comparison.wrong) if not names]
    if kinds == {"local"} and len(right) == 1:
        return Symptom("not sent back", size, {"right": right[0]})
    if kinds == {"local", "broadcast"}:
        return next(symptom for symptom in symptoms if symptom.kind == "broadcast")
    if kinds == {"left out"} and len({symptom.numbers["rank"] for symptom in symptoms}) > 1:
        return Symptom("neighbours", size)
    if UNKNOWN in kinds and _is_misplaced(comparison):
        return Symptom("misplaced", size)
    if kinds == {UNKNOWN} and not right and size > 1 and _is_agreed(comparison):
        return Symptom("agreed", size)
    # If ranks differ, the symptom of most of them is the most informative.
    kinds_of_all = [symptom.kind for symptom in symptoms]
    return max(symptoms, key=lambda symptom: (kinds_of_all.count(symptom.kind), symptom.kind != UNKNOWN))


def _missing(comparison: Comparison) -> str:
    for rank, names in enumerate(comparison.wrong):
        for name in names:
            right = comparison.right[name]
            if right is None:
                return "filled"
            if comparison.found[rank][name] is None:
                is_unused = comparison.local.ranks[rank][name] is None
                return "missing" if is_unused and right.any() else "left without"
    return ""


def _is_shifted(comparison: Comparison) -> bool:
    """Whether everything before a parameter that only some ranks used is right, and everything after it, in one
    direction, is wrong."""
    present = [{name for name, g in ranks.items() if g is not None} for ranks in comparison.local.ranks]
    odd = set[str]().union(*present) - present[0].intersection(*present)
    names = [name for name, right in comparison.right.items() if right is not None]
    wrong: set[str] = set().union(*comparison.wrong)
    places = [i for i, name in enumerate(names) if name in odd]
    bad, good = ([i for i, name in enumerate(names) if (name in wrong) == is_wrong] for is_wrong in (True, False))
    if not places or not bad or not good:
        return False
    forward = max(good) < places[0] <= min(bad) and max(bad) > places[-1]
    backward = min(good) > places[-1] >= max(bad) and min(bad) < places[0]
    return forward or backward


def _is_agreed(comparison: Comparison) -> bool:
    first, *others = comparison.found
    return all(
        agrees(other[name], tensor, comparison.scale(name)) for other in others for name, tensor in first.items()
    )


def _is_misplaced(comparison: Comparison) -> bool:
    def total(gradients: Mapping[str, torch.Tensor | None]) -> float:
        return sum(g.double().sum().item() for g in gradients.values() if g is not None)

    size = sum(g.double().abs().sum().item() for g in comparison.right.values() if g is not None)
    return all(abs(total(found) - total(comparison.right)) < 1e-6 * size for found in comparison.found)
