"""One iteration of rank 0 over time: its phases, and its gradient calls during and after backward."""

from collections.abc import Sequence
from dataclasses import dataclass

from cos598d.records.conventions import PHASES
from cos598d.records.run import Summary
from cos598d.terminal.colours import DARK_GREY, VERMILLION
from cos598d.terminal.words import number_of
from cos598d.tools.report.blocks import Block, Figure
from cos598d.tools.report.load import Run
from cos598d.tools.report.numbers import is_number, seconds
from cos598d.tools.report.scaling import comparable
from cos598d.tools.report.svg import PHASE_LOOKS, bar, draw, legend_below, patch, shortened
from cos598d.tools.report.traffic_table import is_in_ledger

Span = tuple[str, float, float]
BESIDE, AFTER = ("#F3C6A5", ""), (VERMILLION, "///")
# A timeline is drawn on the scale of the longest, unless that would make it illegible.
LEAST_OF_SCALE = 0.25
FEW_CALLS = 12  # get a lane with a name each; hundreds form a staircase of the same height


@dataclass(frozen=True)
class Timeline:
    """`spans`: phase, start and length; `calls`: tensor, start and end; all in seconds since the iteration began.

    A call that overlaps other work ends when it was waited for, which may be later than its real end. `untimed` counts
    a library's calls without times. `kept` is the rule (--ledger) because of which the record has no calls of any
    iteration, though there were some; otherwise None.
    """

    run: str
    iteration: int
    seconds: float
    spans: list[Span]
    calls: list[Span]
    untimed: int
    backward_end: float
    kept: str | None = None
    is_told: bool = True  # otherwise a library makes the calls, and the ledger does not have them
    of_weights: int = 0  # calls with weights, which are not among `calls`

    @property
    def seconds_under_way(self) -> tuple[float, float]:
        """Seconds with a running call before backward ended, and after."""
        before = _covered([(start, min(end, self.backward_end)) for _, start, end in self.calls])
        return before, _covered([(max(start, self.backward_end), end) for _, start, end in self.calls])


def timeline_blocks(runs: Sequence[Run]) -> list[Block]:
    """A figure of each run's typical iteration; comparable runs share a scale."""
    found = {run.name: timeline_of(run) for run in runs}
    longest = {
        run.name: max((one.seconds for other in group if (one := found[other.name])), default=0.0)
        for group in comparable(runs)
        for run in group
    }
    blocks: list[Block] = []
    for one in found.values():
        if one is not None:
            shared = longest.get(one.run, 0.0)
            until = shared if one.seconds >= LEAST_OF_SCALE * shared > 0 else one.seconds
            name = f"timeline{len(blocks)}"
            blocks.append(Figure(name, _figure(one, name, until), [_caption(one)]))
    without = [run.name for run in runs if found[run.name] is None and run.summary["losses"]]
    if without:
        blocks.append(
            f"The records of {', '.join(without)} have no times of phases, since an older version wrote them."
        )
    return blocks


def timeline_of(run: Run) -> Timeline | None:
    """The run's typical iteration; None if the records do not have the times of its phases."""
    row = run.typical
    if row is None or not row.get("spans_seconds"):
        return None
    gradients = [call for call in run.calls if call["purpose"] == "gradients"]
    timed = [call for call in gradients if is_number(call.get("started")) and is_number(call.get("seconds"))]
    calls = [(call["tensor"], call["started"], call["started"] + call["seconds"]) for call in timed]
    spans: list[Span] = [tuple(span) for span in row["spans_seconds"]]
    return Timeline(
        run=run.name,
        iteration=row["iteration"],
        seconds=row["seconds"],
        spans=spans,
        calls=sorted(calls, key=lambda call: call[1:]),
        untimed=len(gradients) - len(timed),
        backward_end=max((start + length for phase, start, length in spans if phase == "backward"), default=0.0),
        kept=None if run.calls else rule_without_rows(run.summary),
        is_told=is_in_ledger(run.summary),
        of_weights=sum(call["purpose"] == "parameters" for call in run.calls),
    )


def rule_without_rows(summary: Summary) -> str | None:
    """The rule (--ledger) because of which a record has no rows of the gradients' calls; None if it has, or if there
    are no calls."""
    return summary.get("ledger", {}).get("kept") if summary["calls_per_iteration"] else None


def _covered(spans: list[tuple[float, float]]) -> float:
    """Seconds that at least one of the spans covers."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _caption(timeline: Timeline) -> str:
    """When backward ends, how much of the gradient calls' time is before and after it, and what is not drawn."""
    words = f"{timeline.run}, iteration {timeline.iteration} of rank 0, {seconds(timeline.seconds)}"
    sentences = [f"{words}: backward ends at {seconds(timeline.backward_end)}."]
    if timeline.calls:
        before, after = timeline.seconds_under_way
        sentences.append(
            f"{number_of(len(timeline.calls), 'gradient call')}: {seconds(before)} with at least one under way before "
            f"that, {seconds(after)} after it."
        )
        if timeline.of_weights:
            sentences.append(f"{number_of(timeline.of_weights, 'call')} that gathered weights: not counted here.")
        if before > 0:
            sentences.append(
                "A call during backward is drawn until something waits for it, so it may have ended earlier."
            )
    if timeline.untimed:
        words = number_of(timeline.untimed, "gradient call")
        sentences.append(f"{words} of torch's own, whose times are not recorded.")
    if timeline.kept:
        sentences.append(f"Its calls were not kept (--ledger {timeline.kept}).")
    elif not timeline.is_told:
        sentences.append("The library does not report its calls, so they are not drawn.")
    elif not timeline.calls and not timeline.untimed:
        sentences.append("No gradient is sent.")
    return " ".join(sentences)


def _figure(timeline: Timeline, name: str, until: float) -> str:
    """The iteration from left to right: its phases in the first lane, each gradient call below."""
    calls = timeline.calls
    is_few = len(calls) <= FEW_CALLS
    lane = 1.0 if is_few else FEW_CALLS / len(calls)

    def paint(figure):
        axes = figure.subplots()
        for phase, start, length in timeline.spans:
            bar(axes, PHASE_LOOKS[phase], start, length, 0, 0.8)
        labels: dict[float, str] = {0: "phases"}
        for number, (tensor, start, end) in enumerate(calls):
            y = 1 + (number + 0.5) * lane - 0.5
            split = min(max(start, timeline.backward_end), end)
            if is_few:
                bar(axes, BESIDE, start, split - start, y, 0.8)
                bar(axes, AFTER, split, end - split, y, 0.8)
            else:  # a stair has no room for edges and hatches
                axes.barh([y, y], [split - start, end - split], lane, [start, split], color=[BESIDE[0], AFTER[0]])
            if is_few or number in (0, len(calls) - 1):
                labels[y] = shortened(tensor, 12)
        if timeline.untimed and not calls:
            axes.broken_barh([(0, timeline.seconds)], (0.6, 0.8), facecolor="none", edgecolor=DARK_GREY, linestyle=":")
            untimed = f" {number_of(timeline.untimed, 'call')}, times not recorded"
            axes.text(0, 1, untimed, ha="left", va="center")
        axes.set_yticks(list(labels), list(labels.values()))
        axes.set_ylim(0.6 + (max(1, len(calls) * lane) if calls or timeline.untimed else 0), -0.6)
        axes.set_xlim(0, until)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("seconds since the iteration began")
        used = [phase for phase in PHASES if any(span[0] == phase and span[2] > 0 for span in timeline.spans)]
        looks, words = [PHASE_LOOKS[phase] for phase in used], list(used)
        if any(start < timeline.backward_end for _, start, _ in calls):
            looks, words = [*looks, BESIDE], [*words, "call during backward"]
        if any(end > timeline.backward_end for *_, end in calls):
            looks, words = [*looks, AFTER], [*words, "call after backward"]
        legend_below(figure, [patch(*look) for look in looks], words)

    label = f"one iteration of {seconds(timeline.seconds)} of {timeline.run}: its phases and gradient calls"
    return draw(name, label, 65 + 20 * min(max(1, len(calls)), FEW_CALLS), paint)
