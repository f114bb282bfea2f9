"""Runs next to one another: repeats as one run, baselines (DDP, the floor, one rank) and what two runs must share for
them, and whether their seconds differ by more than their spread."""

import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from cos598d.records.conventions import DDP, FLOOR
from cos598d.records.run import Summary

AnyRun = TypeVar("AnyRun")
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
    return [_merged(group) if len(group) > 1 else group[0] for group in grouped(runs, is_repeat)]


def grouped(found: Sequence[AnyRun], is_alike: Callable[[AnyRun, AnyRun], bool]) -> list[list[AnyRun]]:
    """Groups of what `is_alike` to the first of its group, in the order of their firsts."""
    groups: list[list[AnyRun]] = []
    for one in found:
        group = next((group for group in groups if is_alike(group[0], one)), None)
        groups.append([one]) if group is None else group.append(one)
    return groups


def is_repeat(run: Summary, other: Summary) -> bool:
    """Whether two runs have the same settings on the same machine; "repeat_of" is `what_was_asked`."""
    return run.get("repeat_of") is not None and run["repeat_of"] == other.get("repeat_of")


def members(run: Summary) -> list[Summary]:
    """The runs in a row: those that were merged, or the single run."""
    return run.get("repeats") or [run]


def is_disturbed(run: Summary) -> bool:
    """Whether the run's seconds, or those of one of its repeats, are not its own."""
    return any(member.get("taken_by_others") for member in members(run))


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


# What two runs must share for a difference of their losses to be meaningful.
SETTING = ("task", "model", "data", "total_train_batch_size", "max_seq_length", "dropout", "precision", "seed")


def same_setting(run: Summary, other: Summary) -> bool:
    """Whether the two runs should have equal losses in each iteration: equal data, batch, seed, rates and so on.

    A missing value is unknown, and differs from nothing.
    """
    mine, theirs = run.get("step", {}), other.get("step", {})
    known = [word for word in mine if mine[word] is not None and theirs.get(word) is not None]
    return all(run[name] == other[name] for name in SETTING) and all(mine[word] == theirs[word] for word in known)


def drifts(run: Summary) -> bool:
    """Whether the run's ranks do not average in every step, so that losses diverge on purpose."""
    return is_floor(run) or (run["world_size"] > 1 and (run.get("step", {}).get("steps between averages") or 1) > 1)


def has_all_rows(run: Summary) -> bool:
    """Whether the run's losses begin with the first iteration; rows may be lost when a run resumes elsewhere."""
    ends = [one["to_iteration"] for one in run.get("attempts", [])[-1:] if one["ended"]]
    return all(end == run["iterations"] for end in ends)


def alike(runs: Sequence[Summary], like: Summary, sync: str) -> Summary | None:
    """The first run with this sync that has the number of ranks, the setting and the network of `like`.

    If it has repeats among `runs`, and `like` is the k-th of its own, the k-th of them.
    """
    found = [
        run
        for run in runs
        if run["sync"] == sync
        and run["world_size"] == like["world_size"]
        and run["network"] == like["network"]
        and same_setting(run, like)
    ]
    if not found:
        return None
    repeats = [run for run in found if run is found[0] or is_repeat(run, found[0])]
    place = sum(is_repeat(run, like) for run in runs[: next((i for i, run in enumerate(runs) if run is like), 0)])
    return repeats[place] if place < len(repeats) else repeats[0]


def alone_of(runs: Sequence[Summary], run: Summary) -> Summary | None:
    """The run of one rank with which a run's losses are compared."""
    return next((other for other in runs if other["world_size"] == 1 and same_setting(run, other)), None)


def ddp_of(runs: Sequence[Summary], run: Summary) -> Summary | None:
    """The run with torch's DDP with which a run's seconds are compared."""
    return alike(runs, run, DDP)


def floor_of(runs: Sequence[Summary], run: Summary) -> Summary | None:
    """The run without any sync from which a run's exposed communication is computed."""
    return alike(runs, run, FLOOR) if run["world_size"] > 1 else None


def is_floor(run: Summary) -> bool:
    """Whether the run's replicas never average."""
    return run["sync"] == FLOOR and run["world_size"] > 1


def exposed_seconds(run: Summary, floor: Summary | None) -> float | None:
    """The run's median minus its floor's, in seconds; None if either is missing, and for the floor itself."""
    if floor is None or run is floor:
        return None
    median, base = run["seconds_per_iteration"]["median"], floor["seconds_per_iteration"]["median"]
    return None if median is None or base is None else median - base


def ratio_of_means(run: Summary, base: Summary) -> float | None:
    """The ratio of the two runs' mean seconds; None if either has none."""
    mean, other = run["seconds_per_iteration"]["mean"], base["seconds_per_iteration"]["mean"]
    return mean / other if mean and other else None


def largest_difference(run: Summary, alone: Summary) -> float | None:
    """The largest difference of the two runs' losses in one iteration, over all repeats; None without iterations."""
    pairs = [pair for member in members(run) for pair in zip(member["losses"], alone["losses"])]
    return max(abs(a - b) for a, b in pairs) if pairs else None


def are_apart(one: Summary, other: Summary) -> bool:
    """Whether the 95 % confidence interval of the means' difference excludes 0; False if it is unknown or disturbed.

    For runs with equally many repeats: whether the interval of their ratio, repeat by repeat, excludes 1.
    """
    if is_disturbed(one) or is_disturbed(other):
        return False
    several = over_pairs(one, other, ratio_of_means)
    if several:
        return not several[1][0] <= 1 <= several[1][1]
    found = difference(one, other)
    return found is not None and not found[0] <= 0 <= found[1]


def difference(one: Summary, other: Summary) -> tuple[float, float] | None:
    """The 95 % confidence interval of the difference of the means (Welch's t); None if one of them has no interval.

    Source: B. L. Welch, Biometrika 34 (1947), 28-35.
    """
    first, second = _error_of_mean(one), _error_of_mean(other)
    if first is None or second is None:
        return None
    middle = one["seconds_per_iteration"]["mean"] - other["seconds_per_iteration"]["mean"]
    squares = first[0] ** 2, second[0] ** 2
    if not sum(squares):
        return middle, middle
    freedom = sum(squares) ** 2 / (squares[0] ** 2 / first[1] + squares[1] ** 2 / second[1])
    margin = student_t(freedom) * sum(squares) ** 0.5
    return middle - margin, middle + margin


def _error_of_mean(run: Summary) -> tuple[float, int] | None:
    """The standard error of the run's mean seconds, and its degrees of freedom."""
    seconds, repeats = run["seconds_per_iteration"], len(members(run))
    interval, count = seconds["interval_95"], repeats if repeats > 1 else seconds.get("counted")
    if not interval or not count or count < 2:
        return None
    return (interval[1] - interval[0]) / 2 / student_t(count - 1), count - 1
