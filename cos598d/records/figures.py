"""A run's figures from its rows of iterations: of a run that has ended, is running or was killed. Needs no torch."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from cos598d.records.conventions import COUNTED, PHASES, SILENT, WARM_UP
from cos598d.records.schema import Attempt, AttemptRow, Iteration

TOTALS = ("calls", "tensors", "payload_bytes", "bytes_sent", "bytes_received")
WAYS = ("bytes_sent", "bytes_received")
TRAFFIC = tuple(f"{kind}_{way}" for kind in ("predicted", "counted") for way in WAYS)
_PHASES = tuple(f"seconds_{phase}" for phase in PHASES)
_SUMMED = (*_PHASES, *TOTALS, *TRAFFIC)
_summed = attrgetter(*_SUMMED)


def added(some: dict[str, list[int]], more: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Add the numbers of `more` to the lists of the same name in `some`, and return it."""
    for name, values in more.items():
        before = some.setdefault(name, [0] * len(values))
        some[name] = [one + other for one, other in zip(before, values, strict=True)]
    return some


def rank_figures(rows: Iterable[Iteration]) -> dict[str, Any]:
    """What the summary needs of one rank's rows (JSON), in one pass.

    Mean seconds exclude the warm-up, if iterations follow it. Bytes include all iterations: a sync may send a step's
    weights in the next step, so a mean without the first step would exceed one step's bytes.
    """
    sums: dict[tuple[int, bool], list[int | float | None]] = {}
    purposes: dict[str, list[int]] = {}
    for row in rows:
        part = row.epoch, row.iteration > WARM_UP
        before = sums.get(part)
        values = (1, *_summed(row))
        sums[part] = list(values) if before is None else [_known(a, b) for a, b in zip(before, values, strict=True)]
        added(purposes, row.by_purpose)
    parts = {part: dict(zip(("iterations", *_SUMMED), values, strict=True)) for part, values in sums.items()}
    every = _together(parts.values())
    timed = _together([found for (_, is_timed), found in parts.items() if is_timed]) or every
    epochs = {str(epoch): _together([parts[part] for part in parts if part[0] == epoch]) for epoch, _ in parts}
    return {
        "iterations": every.get("iterations", 0),
        "phases": {name: timed[name] / timed["iterations"] if timed else None for name in _PHASES},
        "totals": {name: _mean(every.get(name, 0), every.get("iterations", 0)) or 0 for name in TOTALS},
        "by_purpose": purposes,
        "epochs": {epoch: {name: found[name] for name in TRAFFIC} for epoch, found in epochs.items()},
    }


def run_figures(rows: Iterable[Iteration], ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The summary's figures, from rank 0's rows and the `rank_figures` of all ranks in order."""
    losses, seconds = [], []
    clock, wall, examples = 0.0, 0.0, 0
    for row in rows:
        losses.append(row.loss)
        seconds.append(row.seconds)
        if row.iteration > WARM_UP:
            clock, wall, examples = clock + row.seconds, wall + row.wall_seconds, examples + row.examples
    first = ranks[0]
    return {
        "iterations": len(losses),
        "losses": losses,
        "seconds_per_iteration": summarize_seconds(seconds),
        "phases": {name: _mean_of_known([rank["phases"][name] for rank in ranks]) for name in _PHASES},
        **{f"{name}_per_iteration": first["totals"][name] for name in TOTALS[:3]},
        **{f"{name}_per_iteration": [rank["totals"][name] for rank in ranks] for name in TOTALS[3:]},
        "ledger": {"by_purpose": purposes_of([rank["by_purpose"] for rank in ranks])},
        "wall": _rates(examples, clock, wall) | {"share_off_the_clock": 1 - clock / wall if wall else None},
    }


def summarize_seconds(seconds: Sequence[float]) -> dict[str, Any]:
    """Mean, median, 90th percentile and the mean's 95 % confidence interval (Student's t) of iterations after WARM_UP.

    The interval is for this run's iterations: another run with the same settings may lie outside it. The first
    iteration is a field of its own. A figure is None if there are too few iterations for it.
    """
    import numpy as np

    counted = np.asarray(seconds[WARM_UP:], dtype=np.float64)
    found: dict[str, Any] = {"first": seconds[0] if len(seconds) else None, "counted": len(counted)}
    found |= dict.fromkeys(("mean", "median", "p90", "interval_95"))
    if len(counted):
        found |= {"mean": statistics.fmean(counted), "median": float(np.median(counted))}
        found["p90"] = float(np.quantile(counted, 0.9))
    if len(counted) > 1:
        from scipy.special import stdtrit  # the quantile of t; importing scipy.stats would take half a second

        margin = float(stdtrit(len(counted) - 1, 0.975) * np.std(counted, ddof=1)) / len(counted) ** 0.5
        found["interval_95"] = [found["mean"] - margin, found["mean"] + margin]
    return found


def purposes_of(ranks: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Any]:
    """The summary's "by_purpose": rank 0's calls and payload bytes, and the bytes sent and received by rank."""
    found = {}
    for purpose in dict.fromkeys(purpose for rank in ranks for purpose in rank):
        calls, payload, sent, received = zip(*(rank.get(purpose, (0, 0, 0, 0)) for rank in ranks), strict=True)
        found[purpose] = {"calls": calls[0], "payload_bytes": payload[0]}
        found[purpose] |= {"bytes_sent": list(sent), "bytes_received": list(received)}
    return found


def epoch_training(rows: Iterable[Iteration]) -> dict[str, Any]:
    """An epoch's examples, its seconds by its iterations' clocks and by wall time, both rates, and its tokens or
    images, with their rate by wall time."""
    clock, wall, examples = 0.0, 0.0, 0
    counts: dict[str, int] = {}
    for row in rows:
        clock, wall = clock + row.seconds, wall + row.wall_seconds + row.wall_seconds_after
        examples += row.examples
        for name in COUNTED:
            if (count := getattr(row, name)) is not None:
                counts[name] = counts.get(name, 0) + count
    found = {"examples": examples, "clock_seconds": clock, "wall_seconds": wall, **_rates(examples, clock, wall)}
    return found | counts | {f"{name}_per_second_wall": count / wall for name, count in counts.items() if wall}


def epoch_traffic(ranks: Sequence[Mapping[str, Any]], epoch: int) -> dict[str, list[float | None]]:
    """An epoch's predicted and counted bytes by rank; counted is None unless the kernel has counted every iteration.

    *Predicted* is a rank's bytes by the formulas of its calls, in an iteration and after it, until the next one begins.
    It includes gradients, what the ranks agree on, the loss, and state that a checkpoint collects. *Counted* is what
    the kernel counted meanwhile: on the interface, with the headers of every packet, or of own sockets. Both exclude
    evaluations, and what follows them until the next iteration.

    If k ranks share an interface, its counters are the sum of all k: compare them with the sum of the k predictions.
    A rank that had no part in an epoch, because the run resumed with more or fewer ranks, moved no bytes in it.
    """
    found = [rank["epochs"].get(str(epoch)) for rank in ranks]
    known = next((one for one in found if one), None)
    if known is None:
        return {}
    missing = {name: None if known[name] is None else 0 for name in TRAFFIC}
    return {name: [(one or missing)[name] for one in found] for name in TRAFFIC}


def wire_figures(ranks: Sequence[Mapping[str, Any]], interfaces: Sequence[Sequence[Any] | None]) -> dict | None:
    """The summary's "wire": means per iteration by rank, None for a rank that has not counted; None if none has.

    `interfaces`: the interface on which each rank has counted, as its name and ranks. `interface` and `shared_by_ranks`
    are those of the first rank that has counted. `ranks_by_interface` lists for all which ranks count together. Each
    list's counted bytes, which are equal, belong next to the sum of its predicted bytes.
    """
    means: list[dict[str, float | None]] = []
    known: list[Sequence[Any]] = []
    for rank, interface in zip(ranks, interfaces, strict=True):
        sums = _together(rank["epochs"].values()) if interface else {}
        means.append({name: _mean(sums.get(name), rank["iterations"]) for name in TRAFFIC})
        if interface and means[-1]["counted_bytes_sent"] is not None:
            known.append(interface)
    if not known:
        return None
    of_ranks = {name: [mean[name] for mean in means] for name in TRAFFIC}
    return {
        "interface": known[0][0],
        "shared_by_ranks": len(known[0][1]),
        "ranks_by_interface": sorted({tuple(ranks) for _, ranks in known}),
        **{f"{name.removeprefix('counted_')}_per_iteration": values for name, values in of_ranks.items()},
    }


def attempts_of(rows: Iterable[AttemptRow], reached: int) -> list[Attempt]:
    """A run's attempts from the rows of their begins and ends. One that was killed has no end.

    `reached` is the last iteration that the last of them has done. `lost_iterations` are those that a later attempt
    repeated.
    """
    found: list[Attempt] = []
    for row in rows:
        if row.begun is None:
            found[-1].ended, found[-1].why, found[-1].to_iteration = row.ended, row.why, row.iteration
            continue
        if found and found[-1].why is None:
            found[-1].why, found[-1].to_iteration = SILENT, row.iteration + row.lost_iterations
        for one in found:
            again = one.to_iteration - max(one.from_iteration, row.iteration)
            one.lost_iterations = max(one.lost_iterations, again)
        found.append(Attempt(row.begun, row.iteration, row.iteration, 0, row.ranks or 1))
    if found and found[-1].why is None:
        found[-1].to_iteration = reached
    return found


def _rates(examples: int, clock: float, wall: float) -> dict[str, float | None]:
    return {
        "examples_per_second_clock": examples / clock if clock else None,
        "examples_per_second_wall": examples / wall if wall else None,
    }


def _mean(total: int | None, count: int) -> float | None:
    """An int if the division has no remainder; None without a total, or without anything that it counts."""
    if total is None or not count:
        return None
    return total / count if total % count else total // count


def _known(one: float | None, other: float | None) -> float | None:
    """The sum; None if a part of it is not known."""
    return None if one is None or other is None else one + other


def _together(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of several parts, by name; nothing of none."""
    found: dict[str, Any] = {}
    for part in parts:
        found = {name: _known(found.get(name, 0), value) for name, value in part.items()}
    return found


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
