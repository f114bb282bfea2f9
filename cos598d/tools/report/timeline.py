"""One iteration of rank 0 in the order of time: its phases, and its gradient calls beside and after backward."""

from dataclasses import dataclass

from cos598d.records.run import Summary
from cos598d.tools.report.bytes_from import is_in_ledger
from cos598d.tools.report.load import Run, is_number

Span = tuple[str, float, float]


@dataclass(frozen=True)
class Timeline:
    """`spans`: phase, start and length; `calls`: tensor, start and end; all in seconds since the iteration began.

    A call that runs beside other work ends when it was waited for, which may be later than it was done. `untimed`
    counts the calls that a library made without telling when. `kept` is the rule (--ledger) by which the record has no
    calls of any iteration, though there were some; else None.
    """

    run: str
    iteration: int
    seconds: float
    spans: list[Span]
    calls: list[Span]
    untimed: int
    backward_end: float
    kept: str | None = None
    is_told: bool = True  # else the calls are a library's, which the ledger does not have
    of_weights: int = 0  # calls that carried weights, which are not among `calls`

    @property
    def seconds_under_way(self) -> tuple[float, float]:
        """Seconds with a call under way before backward ended, and after."""
        before = _covered([(start, min(end, self.backward_end)) for _, start, end in self.calls])
        return before, _covered([(max(start, self.backward_end), end) for _, start, end in self.calls])


def timeline_of(run: Run) -> Timeline | None:
    """The run's typical iteration; None where the records do not say when its phases began."""
    row = run.typical
    if row is None or not row.get("spans_seconds"):
        return None
    spans = row["spans_seconds"]
    gradients = [call for call in run.calls if call["purpose"] == "gradients"]
    timed = [call for call in gradients if is_number(call.get("started")) and is_number(call.get("seconds"))]
    calls = [(call["tensor"], call["started"], call["started"] + call["seconds"]) for call in timed]
    backward_end = max((start + length for phase, start, length in spans if phase == "backward"), default=0.0)
    return Timeline(
        run=run.name,
        iteration=row["iteration"],
        seconds=row["seconds"],
        spans=[tuple(span) for span in spans],
        calls=sorted(calls, key=lambda call: call[1:]),
        untimed=len(gradients) - len(timed),
        backward_end=backward_end,
        kept=None if run.calls else rule_without_rows(run.summary),
        is_told=is_in_ledger(run.summary),
        of_weights=sum(call["purpose"] == "parameters" for call in run.calls),
    )


def rule_without_rows(summary: Summary) -> str | None:
    """The rule (--ledger) by which a record has rows of none of the gradients' calls; None where it has, or there are
    none."""
    return summary.get("ledger", {}).get("kept") if summary["calls_per_iteration"] else None


def _covered(spans: list[tuple[float, float]]) -> float:
    """Seconds that at least one of the spans covers."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
