"""What many runs will cost, before any of them is started: a table with a row for each name."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from cos598d.config import config_from
from cos598d.cost.forecast import Forecast, forecast
from cos598d.cost.planned import Known
from cos598d.errors import WARNING, UserError
from cos598d.records.conventions import AUTO_PRECISION
from cos598d.terminal.printable import printable
from cos598d.terminal.tables import as_text
from cos598d.tools.runs.planned import PlannedRun
from cos598d.tools.runs.runner import seconds_words

HEAD = ["run", "times", "ranks", "iterations", "sent MB/it", "peak MB", "s/it", "seconds"]


def forecast_words(runs: Sequence[PlannedRun], parallel: int, costs_from: tuple[Path, ...] = ()) -> str:
    """The seconds of all runs, then a table of what the runs of each name send, hold and take, then its sources.

    The first run of each name stands for the others. Sent: by the rank that sends most. Peak: model, gradients and
    optimizer of the rank that holds most. Seconds: training only. A run without a prediction has a sentence instead.
    """
    known, rows, notes, total = Known(costs_from), [HEAD], list[str](), 0.0
    basis: dict[tuple[int, bool], str] = {}  # one source for each number of ranks, since they differ only in details
    times = Counter(one.name for one in runs if not one.refused)
    for name in times:
        one = next(one for one in runs if one.name == name)
        try:
            found = forecast(config_from(one.values), one.setup.world_size, one.setup.hosts, one.rate, one.delay, known)
        except UserError as error:
            notes.append(f"{name}: {error}")
            continue
        rows.append([name, str(times[name]), str(one.setup.world_size), *_cells(found)])
        total += (found.seconds or 0.0) * times[name]
        chosen = found.precision
        notes += [f"{name} may send more: {found.bytes_more}."] if found.bytes_more else []
        notes += filter(None, [found.bytes_unsaid, found.memory_unsaid, chosen.warning and WARNING + chosen.warning])
        notes += [chosen.remark] if one.values.get("precision") == AUTO_PRECISION else []
        ranks = one.setup.world_size
        basis.setdefault(
            (ranks, found.seconds is None), f"Seconds on {ranks} rank{'s'[: ranks - 1]}: {found.seconds_from}."
        )
    notes = list(dict.fromkeys([*notes, *basis.values()]))
    answer = []
    if total:
        at_a_time = f", if there are cores for {parallel} runs at a time" if parallel > 1 else ""
        answer.append(f"About {seconds_words(total / parallel)} of training{at_a_time}, plus start and evaluation.")
    return "\n\n".join([*answer, as_text(rows, numbers=True), *map(printable, notes)])


def _cells(found: Forecast) -> list[str]:
    sent = max(found.bytes_sent_per_iteration, default=None)
    step, seconds = found.seconds_per_iteration, found.seconds
    return [
        str(found.iterations),
        "-" if sent is None else f"{sent / 1e6:,.2f}",
        f"{found.peak_bytes / 1e6:,.1f}" if found.peak else "-",
        "-" if step is None else f"{step:.3g}",
        "-" if seconds is None else f"{seconds:.3g}",
    ]
