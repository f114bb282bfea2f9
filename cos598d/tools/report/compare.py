"""The table of runs: seconds, ratios, bytes and losses. Runs of the same settings are repeats, and share a row.

A ratio or a difference is taken only to a run that differs in nothing but how gradients travel: to torch's DDP, to
the floor (replicas that never average), and to one rank. With equally many repeats on both sides the k-th of one is
paired with the k-th of the other: what slows a repeat slows both, and cancels.
"""

import json
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from cos598d.records.conventions import DDP, FLOOR
from cos598d.records.summary import mean_interval
from cos598d.tools.report.busy import DISTURBED, TOLERANCE, most_speed_up
from cos598d.tools.report.cells import Interval, Rows, Spread
from cos598d.tools.report.records import HOW, Run, differing

Group = Sequence[Run]
SECONDS, SENT, APART = "s per step", "sent MB per step, by rank", "losses differ from 1 rank by"
RATIO, EXPOSED, SPEED_UP = "times ddp's", "exposed s", "speed-up"
BRIEF = ("run", "sync", "ranks", SECONDS, SENT, APART)


def table(runs: Sequence[Run]) -> Rows:
    """A row for each group of repeats; BRIEF are the columns for a small table."""
    found, groups = [], in_groups(runs)
    for group in groups:
        run, busy = group[0], is_busy(group)
        ddp, floor, alone = base_of(groups, group, DDP), base_of(groups, group, FLOOR), alone_of(groups, group)
        row = {
            "run": name_of(group),
            "sync": run.summary.sync,
            "ranks": run.summary.world_size,
            SECONDS: DISTURBED if busy else mean_of(group),
            "95 %": interval_of(group),
            RATIO: _paired(group, ddp, ratio),
            EXPOSED: _paired(group, floor, exposed),
            SPEED_UP: speed_up(group, alone),
            SENT: megabytes(run.summary.bytes_sent_per_iteration) if run.is_in_ledger else None,
            APART: losses_apart(group, alone),
        }
        found.append(row)
    return found


def in_groups(runs: Sequence[Run]) -> list[Group]:
    """The runs with those of the same settings on the same machine together, in the order of their firsts."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        how = {name: run.config.get(name) for name in sorted(HOW)}
        key = [run.summary.label, run.summary.world_size, how, run.settings] if not run.summary.unfinished else run.name
        found.setdefault(json.dumps(key, sort_keys=True), []).append(run)
    return [*found.values()]


def name_of(group: Group) -> str:
    """The run's name; of repeats, their label and number."""
    if len(group) == 1:
        return group[0].name
    names = {run.name.rpartition("/")[2] for run in group}
    own = names.pop() if len(names) == 1 else group[0].summary.label or group[0].summary.sync
    return f"{own}, {len(group)} runs"


def is_busy(*groups: Group) -> bool:
    """Whether the seconds of one of the runs are not its own."""
    return any(run.busy for group in groups for run in group)


def mean_of(group: Group) -> float | None:
    """The mean of the repeats' mean seconds."""
    means = [run.mean for run in group if run.mean is not None]
    return fmean(means) if len(means) == len(group) else None


def interval_of(group: Group) -> Interval | None:
    """The mean's 95 % interval: between repeats, or of one run's iterations, outside of which a repeat may be."""
    means = [run.mean for run in group if run.mean is not None]
    if len(group) > 1 and len(means) == len(group):
        return Interval(*mean_interval(means))
    own = group[0].summary.seconds_per_iteration.interval_95
    return Interval(*own) if own else None


def base_of(groups: Sequence[Group], group: Group, sync: str) -> Group | None:
    """The first group of several ranks with this sync that differs from `group` in nothing but how gradients travel."""
    is_several = group[0].summary.world_size > 1
    found = [other for other in groups if other[0].summary.sync == sync and other[0].summary.world_size > 1]
    return next((other for other in found if is_several and not differing([group[0], other[0]])), None)


def alone_of(groups: Sequence[Group], group: Group) -> Group | None:
    """The group of one rank that differs from `group` in nothing else."""
    found = (other for other in groups if other[0].summary.world_size == 1)
    return next((other for other in found if not differing([group[0], other[0]])), None)


def ratio(run: Run, base: Run) -> float | None:
    """The ratio of two runs' mean seconds."""
    return run.mean / base.mean if run.mean and base.mean else None


def exposed(run: Run, floor: Run) -> float | None:
    """The run's median less its floor's, in seconds."""
    median, base = (one.summary.seconds_per_iteration.median for one in (run, floor))
    return None if median is None or base is None else median - base


def speed_up(
    group: Group, alone: Group | None, seconds_of: Callable[[Group], float | None] = mean_of
) -> float | str | None:
    """How many times as fast as one rank; DISTURBED where the machine was busy, or it is more than there is to gain."""
    if not alone or alone[0] is group[0]:
        return None
    mine, base = seconds_of(group), seconds_of(alone)
    if not mine or not base:
        return None
    most = TOLERANCE * most_speed_up(group[0].summary.world_size, group[0].environment)
    return DISTURBED if is_busy(group, alone) or base / mine > most else base / mine


def losses_apart(group: Group, alone: Group | None) -> float | str | None:
    """The largest difference to the losses of one rank in an iteration; "drifts" where the average is not of each."""
    if alone is None or alone[0] is group[0]:
        return None
    pairs = [pair for run in group for pair in zip(run.summary.losses, alone[0].summary.losses)]
    return "drifts" if group[0].drifts else max((abs(mine - theirs) for mine, theirs in pairs), default=None)


def are_apart(one: Group, other: Group) -> bool:
    """Whether the 95 % intervals of their means do not meet; of equally many repeats, whether that of their ratio,
    repeat by repeat, excludes 1."""
    several = _paired(one, other, ratio)
    if isinstance(several, Spread):
        return not several.low <= 1 <= several.high
    mine, theirs = interval_of(one), interval_of(other)
    return mine is not None and theirs is not None and not mine.meets(theirs)


def megabytes(values: Sequence[float | None]) -> list[float | None]:
    """Bytes as megabytes of 1,000,000 bytes."""
    return [None if value is None else value / 1e6 for value in values]


def _paired(group: Group, base: Group | None, figure: Callable[[Run, Run], float | None]) -> Any:
    """A figure of a group and its base; a Spread where both have as many repeats, of which there are several."""
    if base is None or base[0] is group[0]:
        return None
    if is_busy(group, base):
        return DISTURBED
    values = [value for pair in zip(group, base) if (value := figure(*pair)) is not None]
    if len(values) > 1 and len(values) == len(group) == len(base):
        return Spread(fmean(values), *mean_interval(values))
    return fmean(values) if values else None
