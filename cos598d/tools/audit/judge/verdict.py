"""The result of an audit: findings with their evidence, causes before consequences, and how much was judged."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cos598d.tools.audit.judge.words import WORDS

FAULT, WASTE, NOTE = "fault", "waste", "note"
Where = tuple[str, int, str]
# What each fault brings about by itself, in the order in which causes are told.
CONSEQUENCES = {
    "hang": ("uneven_steps", "uneven_calls"),
    "same_batches": ("all_data_everywhere", "overlapping_batches"),
    "all_data_everywhere": ("overlapping_batches", "evaluation_leak"),
    "shares_drawn_apart": ("evaluation_leak",),
    "overlapping_batches": ("evaluation_leak",),
    "different_start": ("weights_drift",),
    "never_waited": (
        *("not_scattered", "never_averaged", "result_dropped", "forgotten_tensors", "partial_average"),
        *("different_gradients", "unequal_weights", "weights_drift"),
    ),
    "never_averaged": ("weights_drift",),
    "result_dropped": ("weights_drift",),
    "not_scattered": ("different_gradients", "weights_drift"),
    "weights_averaged": ("clipped_before_average", "weights_drift"),
    "local_steps": ("clipped_before_average", "weights_drift"),
    "forgotten_tensors": ("different_gradients", "weights_drift"),
    "partial_average": ("clipped_before_average", "weights_drift"),
    "clipped_by_micro_batch": ("clipped_before_average", "lost_micro_batches", "different_gradients"),
    "lost_micro_batches": ("different_gradients", "weights_drift"),
    "leftover_micro_batches": ("stale_gradients", "lost_micro_batches"),
    "different_gradients": ("unequal_weights", "weights_drift"),
    "optimizers_differ": ("weights_drift",),
    "skipped_by_one": ("uneven_steps", "uneven_calls", "batch_norm_apart", "weights_drift"),
    "uneven_steps": ("uneven_calls", "batch_norm_apart", "weights_drift"),
}


@dataclass(frozen=True)
class AuditFinding:
    """One fault, waste or note, by its name in WORDS.

    `evidence` are sentences with numbers. `where` is the file, line and function of the script. `consequences` are the
    names of findings that are only its effects.
    """

    name: str
    evidence: tuple[str, ...]
    where: Where = ("", 0, "")
    consequences: tuple[str, ...] = ()

    @property
    def level(self) -> str:
        """FAULT, WASTE or NOTE."""
        return WORDS[self.name].level

    def to_json(self) -> dict[str, Any]:
        """As JSON, with its title, reason and fix."""
        file, line, function = self.where
        place = {"file": file, "line": line, "function": function}
        found = {"evidence": [*self.evidence], "consequences": [*self.consequences]}
        return {"name": self.name} | WORDS[self.name]._asdict() | place | found


def where(event: Mapping[str, Any]) -> Where:
    """The place of an event of a book."""
    file, line, function = event["where"]
    return file, line, function


def loss_place(books: Sequence[Mapping[str, Any]]) -> Where:
    """Where the first rank's first backward pass is; nowhere if there was none."""
    return next((where(micro) for step in books[0]["steps"] for micro in step["micro"]), ("", 0, ""))


@dataclass(frozen=True)
class Coverage:
    """The basis of an audit: ranks with a book, steps, steps in which gradients were judged, and what was trained."""

    ranks: int
    world_size: int
    steps: int
    judged: int
    seconds: float
    own_seconds: float
    examined: int  # steps that were looked at closely


@dataclass(frozen=True)
class AuditVerdict:
    """An audit's result. `remarks` are sentences about ranks that never came, crashed or were killed."""

    script: str
    seen: Coverage
    findings: tuple[AuditFinding, ...]
    not_judged: tuple[str, ...]
    remarks: tuple[str, ...] = field(default=())

    @property
    def is_sure(self) -> bool:
        """Whether gradients were judged in at least half of the examined steps, with nothing about them left open. Only
        then does no finding mean no fault."""
        are_open = any(each.startswith("gradients:") for each in self.not_judged)
        return self.seen.judged > 0 and self.seen.examined <= 2 * self.seen.judged and not are_open

    def without(self, names: Sequence[str]) -> "AuditVerdict":
        """The same without the findings of these names, and with a remark that lists them."""
        ignored = sorted({each.name for each in self.findings if each.name in names})
        if not ignored:
            return self
        kept = tuple(each for each in self.findings if each.name not in names)
        return replace(self, findings=kept, remarks=(*self.remarks, f"ignored as asked: {', '.join(ignored)}."))

    def of(self, level: str) -> list[AuditFinding]:
        """The findings of one level."""
        return [each for each in self.findings if each.level == level]

    def to_json(self) -> dict[str, Any]:
        """As JSON, for audit.json."""
        return {
            "script": self.script,
            "seen": asdict(self.seen),
            **{f"{level}s": [each.to_json() for each in self.of(level)] for level in (FAULT, WASTE, NOTE)},
            "not_judged": list(self.not_judged),
            "remarks": list(self.remarks),
        }


def ordered(findings: Sequence[AuditFinding]) -> list[AuditFinding]:
    """The findings, each name once, without those that others cause. Each names its own effects."""
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
        told.append(replace(each, consequences=tuple(own)))
    return told
