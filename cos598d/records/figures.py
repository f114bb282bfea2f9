"""A run's figures from its rows of iterations: of a run that has ended, is running or was killed. Needs no torch."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from cos598d.records.conventions import COUNTED, PHASES, SILENT, WARM_UP
from cos598d.records.schema import Attempt, AttemptRow, Iteration
from cos598d.records.summary import mean_interval

TOTALS = ("calls", "payload_bytes", "bytes_sent", "bytes_received")
TRAFFIC = tuple(f"{kind}_{way}" for kind in ("predicted", "counted") for way in TOTALS[2:])
_PHASES = tuple(f"seconds_{phase}" for phase in PHASES)
_columns = attrgetter(*_PHASES, *TOTALS, *TRAFFIC)


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
    places, values = [], []
    purposes: dict[str, list[int]] = {}
    for row in rows:
        places.append((row.epoch, row.iteration))
        values.append(_columns(row))
        added(purposes, row.by_purpose)
    epochs, iterations = np.array(places, dtype=np.int64).reshape(-1, 2).T
    width = len(_PHASES) + len(TOTALS) + len(TRAFFIC)
    table = np.array(values, dtype=np.float64).reshape(-1, width)  # a count that is not known is nan
    seconds, sums = np.split(table, [len(_PHASES)], axis=1)
    timed = seconds[iterations > WARM_UP] if (iterations > WARM_UP).any() else seconds
    return {
        "iterations": len(values),
        "phases": dict(zip(_PHASES, timed.mean(axis=0).tolist(), strict=True)) if values else dict.fromkeys(_PHASES),
        "means": _named(sums.mean(axis=0)) if values else dict.fromkeys(TOTALS, 0) | dict.fromkeys(TRAFFIC),
        "by_purpose": purposes,
        "epochs": {str(epoch): _named(sums[epochs == epoch].sum(axis=0)) for epoch in dict.fromkeys(epochs.tolist())},
    }


def _named(values: np.ndarray) -> dict[str, float | None]:
    """Sums or means of TOTALS and TRAFFIC, by name: an int if there is no remainder, None for one that is not known."""
    found = zip((*TOTALS, *TRAFFIC), values.tolist(), strict=True)
    return {name: None if np.isnan(value) else int(value) if value.is_integer() else value for name, value in found}


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
        **{f"{name}_per_iteration": first["means"][name] for name in TOTALS[:2]},
        **{f"{name}_per_iteration": [rank["means"][name] for rank in ranks] for name in TOTALS[2:]},
        "ledger": {"by_purpose": _purposes([rank["by_purpose"] for rank in ranks])},
        "wire": _wire(ranks),
        "wall": _rates(examples, clock, wall) | {"share_off_the_clock": 1 - clock / wall if wall else None},
    }


def summarize_seconds(seconds: Sequence[float]) -> dict[str, Any]:
    """Mean, median, 90th percentile and the mean's 95 % confidence interval (Student's t) of iterations after WARM_UP.

    The interval is for this run's iterations: another run with the same settings may lie outside it. The first
    iteration is a field of its own. A figure is None if there are too few iterations for it.
    """
    counted = np.asarray(seconds[WARM_UP:], dtype=np.float64)
    found: dict[str, Any] = {"first": seconds[0] if len(seconds) else None, "counted": len(counted)}
    found |= dict.fromkeys(("mean", "median", "p90", "interval_95"))
    if len(counted):
        found |= {"mean": statistics.fmean(counted), "median": float(np.median(counted))}
        found["p90"] = float(np.quantile(counted, 0.9))
    if len(counted) > 1:
        found["interval_95"] = mean_interval(counted.tolist())
    return found


def _purposes(ranks: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Any]:
    """The summary's "by_purpose": rank 0's calls and payload bytes, and the bytes sent and received by rank."""
    found = {}
    for purpose in dict.fromkeys(purpose for rank in ranks for purpose in rank):
        calls, payload, sent, received = zip(*(rank.get(purpose, (0, 0, 0, 0)) for rank in ranks), strict=True)
        found[purpose] = {"calls": calls[0], "payload_bytes": payload[0]}
        found[purpose] |= {"bytes_sent": list(sent), "bytes_received": list(received)}
    return found


def epoch_training(rows: Iterable[Iteration]) -> dict[str, Any]:
    """An epoch's iterations and its examples' mean loss. `training` has its examples, its seconds by its iterations'
    clocks and by wall time, both rates, and its tokens or images, with their rate by wall time."""
    clock, wall, examples, iterations, loss = 0.0, 0.0, 0, 0, 0.0
    counts: dict[str, int] = {}
    for row in rows:
        clock, wall = clock + row.seconds, wall + row.wall_seconds + row.wall_seconds_after
        examples, iterations, loss = examples + row.examples, iterations + 1, loss + row.loss * row.examples
        for name in COUNTED:
            if (count := getattr(row, name)) is not None:
                counts[name] = counts.get(name, 0) + count
    found = {"examples": examples, "clock_seconds": clock, "wall_seconds": wall, **_rates(examples, clock, wall)}
    found |= counts | {f"{name}_per_second_wall": count / wall for name, count in counts.items() if wall}
    return {"iterations": iterations} | ({"loss": loss / examples, "training": found} if iterations else {})


def epoch_traffic(ranks: Sequence[Mapping[str, Any]], epoch: int) -> dict[str, list[float | None]]:
    """An epoch's predicted and counted bytes by rank; counted is None unless the kernel has counted every iteration.

    *Predicted* is a rank's bytes by the formulas of its calls, in an iteration and after it, until the next one begins.
    It includes gradients, what the ranks agree on, the loss, and state that a checkpoint collects. *Counted* is what
    the kernel counted meanwhile, of the rank's own connections. Both exclude evaluations, and what follows them until
    the next iteration. A rank that had no part in an epoch, because the run resumed with more or fewer ranks, moved no
    bytes in it.
    """
    found = [rank["epochs"].get(str(epoch)) for rank in ranks]
    known = next((one for one in found if one), None)
    if known is None:
        return {}
    missing = {name: None if known[name] is None else 0 for name in TRAFFIC}
    return {name: [(one or missing)[name] for one in found] for name in TRAFFIC}


def _wire(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The summary's "wire": means per iteration by rank, None for a rank that has not counted; None if none has."""
    means = [rank["means"] for rank in ranks]
    if all(mean["counted_bytes_sent"] is None for mean in means):
        return None
    return {f"{name.removeprefix('counted_')}_per_iteration": [mean[name] for mean in means] for name in TRAFFIC}


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


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
