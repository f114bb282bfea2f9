"""Runs of the same settings as one: their spread shows what a single run's iterations cannot."""

import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from cos598d.records.run import Summary

# Config fields that do not affect training: paths, resume, logging.
PLACES = frozenset(
    ("output_dir", "overwrite_output_dir", "overwrite_cache", "cache_dir")
    + ("resume", "resume_anyway", "max_seconds", "keep", "log_every", "ledger")
)
# Environment fields that always differ between runs: the launcher, and each rank's node and GPU.
JOB = frozenset(("launcher", "places"))


def what_was_asked(summary: Summary, config: dict[str, Any], environment: dict[str, Any]) -> str:
    """What two runs must share to be repeats of one another: label, flags, machine and the code's commit."""
    named = [summary.get(name) for name in ("label", "sync", "world_size", "model", "data", "precision")]
    asked = {name: value for name, value in config.items() if name not in PLACES}
    ground = {name: value for name, value in environment.items() if name not in JOB}
    return json.dumps([named, asked, ground], sort_keys=True)


def in_groups(runs: Sequence[Summary]) -> list[Summary]:
    """The runs, with those of the same settings merged into one, in the order of their firsts.

    A merged run looks like a run's summary, and has its members as "repeats", in the given order. Its seconds are means
    over the members, and interval_95 is that of this mean, between runs.
    """
    groups: list[list[Summary]] = []
    for run in runs:
        group = next((group for group in groups if is_repeat(run, group[0])), None)
        groups.append([run]) if group is None else group.append(run)
    return [_merged(group) if len(group) > 1 else group[0] for group in groups]


def is_repeat(run: Summary, other: Summary) -> bool:
    """Whether two runs have the same settings on the same machine; "repeat_of" is `what_was_asked`."""
    return run.get("repeat_of") is not None and run["repeat_of"] == other.get("repeat_of")


def members(run: Summary) -> list[Summary]:
    """The runs in a row: those that were merged, or the single run."""
    return run.get("repeats") or [run]


def over_pairs(
    run: Summary, base: Summary, figure: Callable[[Summary, Summary], float | None]
) -> tuple[float, list[float]] | None:
    """The mean of `figure(run, base)` over the repeats, and its 95 % interval.

    The k-th run of one is paired with the k-th of the other: what slows a repeat slows both, and cancels. None unless
    both have the same number of repeats, at least two.
    """
    pairs = list(zip(members(run), members(base)))
    found = [value for pair in pairs if (value := figure(*pair)) is not None]
    if len(pairs) < 2 or len(members(run)) != len(members(base)) or len(found) < len(pairs):
        return None
    return statistics.fmean(found), mean_interval(found)


def mean_interval(values: Sequence[float]) -> list[float]:
    """The 95 % confidence interval of the mean of two values or more (Student's t)."""
    mean = statistics.fmean(values)
    margin = student_t(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return [mean - margin, mean + margin]


def student_t(freedom: float) -> float:
    """The 97.5 % quantile of Student's t: a 95 % interval leaves out half of the rest above it."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))


def _merged(group: Sequence[Summary]) -> Summary:
    first, seconds = group[0], [run["seconds_per_iteration"] for run in group]
    means = [found["mean"] for found in seconds]
    names = dict.fromkeys(run["run"].rpartition("/")[2] for run in group)
    name = next(iter(names)) if len(names) == 1 else first.get("label", first["sync"])
    return first | {
        "run": f"{name}, {len(group)} runs",
        "repeats": list(group),
        "seconds_per_iteration": {
            **{figure: _mean([found[figure] for found in seconds]) for figure in ("first", "mean", "median", "p90")},
            "counted": seconds[0].get("counted"),
            "interval_95": None if None in means else mean_interval(means),
        },
        "phases": {phase: _mean([run["phases"][phase] for run in group]) for phase in first["phases"]},
        "wire": _mean_wire([run.get("wire") for run in group]),
    }


def _mean_wire(wires: Sequence[Summary | None]) -> Summary | None:
    """Counted bytes as means over the runs, if all have counted."""
    known = [wire for wire in wires if wire]
    if len(known) < len(wires):
        return None
    sent = [wire["bytes_sent_per_iteration"] for wire in known]
    return known[0] | {"bytes_sent_per_iteration": [_mean(list(of_rank)) for of_rank in zip(*sent)]}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None
