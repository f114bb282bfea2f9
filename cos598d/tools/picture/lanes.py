"""What ranks did in one step, as lanes in time, from the calls that they noted."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

from cos598d.tools.exam.notes import COLLECTIVES, Noted, Trace

WIDTH, LANE, LEFT, GAP = 900, 26, 70, 14
COLOURS = {"call": "#0072B2", "wait": "#E69F00", "else": "#999999"}


@dataclass(frozen=True)
class Bar:
    """A call of a rank, in seconds since the first one. `waited`: until then others had not begun it. `row`: those that
    are under way at once are in rows of their own."""

    rank: int
    start: float
    end: float
    waited: float
    call: Noted
    row: int


def bars(traces: Sequence[Trace]) -> list[Bar]:
    """The calls of all ranks. A collective begins when its last rank enters."""
    begin = min((call.start for trace in traces for call in trace.calls), default=0.0)
    made = [[call for call in trace.calls if call.op in COLLECTIVES] for trace in traces]
    last = {id(call): max(each.start for each in calls) for calls in zip(*made, strict=False) for call in calls}
    found = []
    for rank, trace in enumerate(traces):
        ends: list[float] = []
        for call in trace.calls:
            row = next((place for place, end in enumerate(ends) if end <= call.start), len(ends))
            ends[row : row + 1] = [call.end]
            waited = min(last.get(id(call), call.start), call.end)
            found.append(Bar(rank, call.start - begin, call.end - begin, waited - begin, call, row))
    return found


def sentence(found: Sequence[Bar]) -> str:
    """Who waited for whom the longest, in words."""
    if not found:
        return "No rank made a call."
    most = max(found, key=lambda bar: bar.waited - bar.start)
    late = max((bar for bar in found if bar.call.alike == most.call.alike), key=lambda bar: bar.start)
    if late.rank == most.rank:
        return "No rank waited for another one."
    milliseconds = 1e3 * (most.waited - most.start)
    call = f"{most.call.op} of {most.call.tensor}"
    return f"Rank {most.rank} waited {milliseconds:.2f} ms for rank {late.rank} in {call}."


def svg(found: Sequence[Bar], title: str) -> str:
    """A lane for each rank, with a tooltip on each call."""
    whole = max((bar.end for bar in found), default=0.0) or 1e-9
    rows = max((bar.row for bar in found), default=0) + 1
    ranks = len({bar.rank for bar in found})
    height = 60 + ranks * (rows * LANE + GAP)

    def x(moment: float) -> float:
        return LEFT + moment / whole * (WIDTH - LEFT - 10)

    def rectangle(left: float, top: float, width: float, tall: float, kind: str, more: str = "", tip: str = "") -> str:
        place = f'x="{left:.1f}" y="{top}" width="{max(width, 0.5):.1f}" height="{tall}" fill="{COLOURS[kind]}"'
        return f"<rect {place}{more}>{f'<title>{html.escape(tip)}</title>' if tip else ''}</rect>"

    parts = [f'<text x="10" y="20" font-weight="bold">{html.escape(title)}</text>']
    for rank in range(ranks):
        top = 34 + rank * (rows * LANE + GAP)
        parts.append(f'<text x="10" y="{top + 17}">rank {rank}</text>')
        parts.append(rectangle(LEFT, top, WIDTH - LEFT - 10, rows * LANE, "else", ' opacity=".25"'))
        for bar in (bar for bar in found if bar.rank == rank):
            for kind, start, end in (("wait", bar.start, bar.waited), ("call", bar.waited, bar.end)):
                tip = f"{bar.call.op} of {bar.call.tensor}, {bar.call.bytes} bytes: {kind} {1e3 * (end - start):.2f} ms"
                y = top + bar.row * LANE + 2
                parts.append(rectangle(x(start), y, x(end) - x(start), LANE - 4, kind, tip=tip))
    told = f"{sentence(found)} {1e3 * whole:.2f} ms in all."
    parts.append(f'<text x="10" y="{height - 10}">{html.escape(told)}</text>')
    view = f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {view}>{"".join(parts)}</svg>\n'
