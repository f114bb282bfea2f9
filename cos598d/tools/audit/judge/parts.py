"""Faults of gradients that are cut over the ranks: parts of one average that are scaled by a factor of each rank."""

import statistics
from typing import Any

from cos598d.tools.audit.judge.fit import INDISTINCT, MEAN, NEAR
from cos598d.tools.audit.judge.gradients import StepFits
from cos598d.tools.audit.judge.verdict import AuditFinding, Where, where

_FLAT = "flat_param"  # of FSDP's first form: its parts have different weights in them


def judge_parts(step: StepFits, place: Where) -> list[AuditFinding]:
    """What it means that the ranks apply different multiples of the average, each to its own parts of the weights.

    Only parts of the same weights are compared: weights of their own may be scaled by factors of their own. A flat
    weight's parts hold different ones, so there only a clip by torch's function is told.
    """
    known = [{name: each.factor for name, each in of.items() if each.kind in (MEAN, INDISTINCT)} for of in step.fits]
    common = [name for name in known[0] if all(name in of for of in known) and name in step.rows[0]["places"]]
    clips = [clip for clip in map(_clip, step.rows) if clip is not None and clip["norm"]]
    norms = [clip["norm"] for clip in clips] if len(clips) == len(step.rows) else []
    by_own_norm = bool(norms) and max(norms) - min(norms) > NEAR * max(norms)
    if not by_own_norm:
        common = [name for name in common if not name.endswith(_FLAT)]
    if not common:
        return []
    factors = [statistics.median(of[name] for name in common) for of in known]
    if max(factors) - min(factors) <= NEAR * max(map(abs, factors)):
        return []
    said = ", ".join(f"rank {rank} {factor:.3f}" for rank, factor in enumerate(factors))
    says = f"Step {step.iteration}: of one average the ranks apply different multiples to their own parts: {said}."
    if by_own_norm:
        told = f"They clip to {clips[0]['limit']:g} by norms of {', '.join(f'{norm:.3f}' for norm in norms)}, by rank."
        return [AuditFinding("clipped_by_part", (says, told), where(clips[0]))]
    if all(0 < factor <= 1 + NEAR for factor in factors):
        return [AuditFinding("clipped_by_part", (says,), place)]
    return [AuditFinding("different_gradients", (says,), place)]


def _clip(row: dict[str, Any]) -> dict[str, Any] | None:
    """The last clip by torch's function in a step."""
    return next((each for each in reversed(row["events"]) if each["kind"] == "clip" and each["how"] == "norm"), None)
