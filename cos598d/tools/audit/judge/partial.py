"""Averages over some of the ranks: the applied gradient has nothing of the others in it."""

import statistics
from collections.abc import Sequence

from cos598d.tools.audit.contents import BROADCAST, GRADIENT, SCATTER
from cos598d.tools.audit.judge.fit import BY_BOTH, BY_RANK, NEAR, OWN, Fit
from cos598d.tools.audit.judge.gradients import Fits, calls_of, named, step_place
from cos598d.tools.audit.judge.verdict import AuditFinding, where


def median_factors(fits: Sequence[Fit]) -> tuple[float, ...]:
    """The factors of several tensors as one."""
    if not fits:
        return ()
    count = len(fits[0].factors)
    alike = [each for each in fits if len(each.factors) == count]
    return tuple(statistics.median(each.factors[place] for each in alike) for place in range(count))


def combination(factors: Sequence[float]) -> str:
    """A sentence on the factors by rank, of which 1 is what an average has."""
    ranks = len(factors)
    parts = " + ".join(f"{factor / ranks:.3f} g{place}" for place, factor in enumerate(factors))
    return f"The applied gradient is {parts}, where an average is {1 / ranks:.3f} of each."


def absent_from(factors: Sequence[float]) -> list[int]:
    """The ranks of which nothing is in it, next to the others' factors: a gradient scaler makes all of them small."""
    most = max(map(abs, factors))
    return [rank for rank, factor in enumerate(factors) if abs(factor) <= NEAR * most]


def partial_average(fits: Fits, factors: Sequence[float], absent: Sequence[int], says: str) -> AuditFinding:
    """The finding, with `says` as its first sentence."""
    there = [rank for rank in range(len(factors)) if rank not in absent]
    who = f"Of ranks {', '.join(map(str, absent))} nothing is in it, only of {', '.join(map(str, there))}."
    calls = [each for each in calls_of(fits.steps[0], GRADIENT) if each["op"] in (BROADCAST, SCATTER)]
    calls = calls or calls_of(fits.steps[0], GRADIENT)
    return AuditFinding("partial_average", (says, who), where(calls[-1]) if calls else step_place(fits))


def _is_of_a_group(fits: Fits, name: str) -> bool:
    """Whether a tensor's gradient travels among some ranks only, as that of an expert that these ranks share."""
    step = fits.steps[0]
    calls = [each for rank in range(len(step.rows)) for each in calls_of(step, GRADIENT, rank)]
    return any(name in each["names"] and len(each["ranks"]) < len(step.rows) for each in calls)


def partial_of_some(fits: Fits, names: Sequence[str]) -> list[AuditFinding]:
    """Some tensors to which every rank applies what some ranks computed: in all steps the same ranks' on all."""
    found: dict[str, tuple[float, ...]] = {}
    for name in names:
        of_name = [[of_rank.get(name) for of_rank in step.fits] for step in fits.steps]
        known = [each for step in of_name for each in step if each and each.kind in (BY_RANK, BY_BOTH)]
        absent = {(*absent_from(each.factors),) for each in known}
        if len(absent) != 1 or absent == {()} or _is_of_a_group(fits, name):
            continue
        nothing_of = next(iter(absent))
        # The rank whose gradient it is applies its own.
        others = [(rank, each) for step in of_name for rank, each in enumerate(step) if each and each not in known]
        if all(each.kind == OWN and rank not in nothing_of for rank, each in others):
            found[name] = median_factors(known)
    if not found:
        return []
    factors = next(iter(found.values()))
    combined = combination(factors)
    says = f"Of {len(names)} tensors {len(found)} ({named([*found])}): {combined[0].lower()}{combined[1:]}"
    return [partial_average(fits, factors, absent_from(factors), says)]
