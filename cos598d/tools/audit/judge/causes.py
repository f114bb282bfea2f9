"""Causes before consequences: a finding that is only the effect of another is put under it."""

from collections.abc import Sequence

from cos598d.tools.audit.judge.verdict import AuditFinding

_DRIFT = ("optimizer_states_differ", "weights_drift")
# What each fault brings about by itself, in the order in which causes are told.
CONSEQUENCES = {
    "hang": ("uneven_steps", "uneven_calls"),
    "same_batches": ("all_data_everywhere", "overlapping_batches"),
    "all_data_everywhere": ("overlapping_batches", "evaluation_leak"),
    "overlapping_batches": ("evaluation_leak",),
    "different_start": ("weights_drift",),
    "never_averaged": _DRIFT,
    "result_dropped": _DRIFT,
    "not_scattered": ("different_gradients", *_DRIFT),
    "weights_averaged": ("clipped_before_average", *_DRIFT),
    "local_steps": ("clipped_before_average", *_DRIFT),
    "forgotten_tensors": ("different_gradients", *_DRIFT),
    "forgotten_micro_batches": ("different_gradients", *_DRIFT),
    "modes_differ": ("same_dropout", "batch_norm_apart"),
    "partial_average": ("clipped_before_average", *_DRIFT),
    "different_gradients": ("unequal_weights", *_DRIFT),
    "optimizers_differ": _DRIFT,
    "optimizer_states_differ": ("weights_drift",),
    "uneven_steps": ("uneven_calls", "batch_norm_apart", *_DRIFT),
    "lost_micro_batches": ("unequal_micro_batches",),
}


def ordered(findings: Sequence[AuditFinding]) -> list[AuditFinding]:
    """The findings without those that others bring about, each of which names its own; one of a name is enough."""
    by_name: dict[str, AuditFinding] = {}
    for each in findings:
        by_name.setdefault(each.name, each)
    effects = {name for cause in by_name for name in CONSEQUENCES.get(cause, ()) if name in by_name}
    rank = {name: place for place, name in enumerate(CONSEQUENCES)}
    causes = [each for each in by_name.values() if each.name not in effects]
    causes.sort(key=lambda each: rank.get(each.name, len(rank)))
    told = []
    for each in causes:
        own = [name for name in CONSEQUENCES.get(each.name, ()) if name in by_name]
        told.append(each.with_consequences(own))
    return told
