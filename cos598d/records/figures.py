"""A run's figures from its rows of iterations: of a run that ended, is running or was killed. Needs no torch."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cos598d.records.conventions import COUNTED, PHASES, WARM_UP

TOTALS = ("calls", "tensors", "payload_bytes", "bytes_sent", "bytes_received")
_PHASES = tuple(f"seconds_{phase}" for phase in PHASES)
# A row's seconds are summed as nanoseconds: sums of whole numbers are exact in any order.
_SECONDS = ("seconds", *_PHASES, "wall_seconds", "wall_seconds_after")
_WHOLE = ("examples", *COUNTED, *TOTALS, "predicted_bytes_sent", "predicted_bytes_received")
_WIRE = ("bytes_sent", "bytes_received", "packets_sent", "packets_received")

Sums = Mapping[str, float]


class RankSums:
    """Sums over one rank's rows by epoch, the run's warm-up separately; `table` (JSON) has those of earlier rows.

    Rows that --ledger leaves out exist only in these sums, so a checkpoint has the table. Mean seconds exclude the
    warm-up, if iterations follow it. Bytes include all iterations. A sync may send a step's weights in the next step,
    so a mean without an epoch's first step would exceed one step's bytes.
    """

    def __init__(self, table: Mapping[str, Sequence[Sums]] | None = None):
        # By epoch: iterations of the warm-up, and later ones.
        self.table = {epoch: [dict(sums) for sums in parts] for epoch, parts in (table or {}).items()}

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row that is final."""
        parts = self.table.setdefault(str(row.get("epoch", 0)), [{}, {}])
        sums = parts[row["iteration"] > WARM_UP]
        terms: dict[str, float] = {"iterations": 1}
        terms |= {name: round(1e9 * row[name]) for name in _SECONDS if name in row}
        terms |= {name: row[name] for name in _WHOLE if name in row}
        if row.get("counted_bytes_sent") is not None:
            terms |= {"counted": 1} | {f"counted_{name}": row.get(f"counted_{name}", 0) for name in _WIRE}
        for name, value in terms.items():
            sums[name] = sums.get(name, 0) + value

    def epoch(self, epoch: int) -> Sums | None:
        """All sums of an epoch; None if this rank had no part in it."""
        parts = self.table.get(str(epoch))
        return None if parts is None else _added(parts)

    def run(self, after_warm_up: bool = False) -> Sums:
        """All sums of the run, or those after the warm-up, which are empty if no iteration follows it."""
        return _added([sums for parts in self.table.values() for sums in parts[after_warm_up:]])

    def mean(self, name: str) -> float:
        """The mean of `name` over all iterations, an int if the division has no remainder; 0 without iterations."""
        return _mean(self.run(), name) or 0

    def mean_seconds(self, name: str) -> float | None:
        """The mean seconds of `name` after the warm-up, or of the warm-up if nothing follows; None without both."""
        sums = self.run(after_warm_up=True)
        mean = _mean(sums if sums else self.run(), name)
        return None if mean is None else mean / 1e9


def run_figures(ranks: Sequence[RankSums], losses: Sequence[float], seconds: Sequence[float]) -> dict[str, Any]:
    """The figures of all iterations: of `ranks` in their order, and of rank 0's losses and seconds by iteration."""
    return {
        "iterations": len(losses),
        "losses": list(losses),
        "seconds_per_iteration": summarize_seconds(seconds),
        "phases": {name: mean_of_known([rank.mean_seconds(name) for rank in ranks]) for name in _PHASES},
        **{f"{name}_per_iteration": ranks[0].mean(name) for name in TOTALS[:3]},
        **{f"{name}_per_iteration": [rank.mean(name) for rank in ranks] for name in TOTALS[3:]},
    }


def summarize_seconds(seconds: Sequence[float]) -> dict[str, Any]:
    """Mean, median, 90th percentile and the mean's 95 % confidence interval (Student's t) of iterations after WARM_UP.

    The interval is for this run's iterations: another run with the same settings may lie outside it. The first
    iteration is a field of its own. A figure is None if there are too few iterations for it.
    """
    import numpy as np

    counted = np.asarray(seconds[WARM_UP:], dtype=np.float64)
    summary: dict[str, Any] = {
        "first": seconds[0] if len(seconds) else None,
        "counted": len(counted),
        **dict.fromkeys(("mean", "median", "p90", "interval_95")),
    }
    if len(counted):
        summary |= {
            "mean": statistics.fmean(counted),
            "median": float(np.median(counted)),
            "p90": float(np.quantile(counted, 0.9)),
        }
    if len(counted) > 1:
        from scipy.special import stdtrit  # the quantile of t; importing scipy.stats would take half a second

        spread = float(np.std(counted, ddof=1))
        margin = float(stdtrit(len(counted) - 1, 0.975)) * spread / len(counted) ** 0.5
        summary["interval_95"] = [summary["mean"] - margin, summary["mean"] + margin]
    return summary


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are not None; None if all are."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def ledger_figures(kept: str, ledgers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The summary's "ledger", from the sums of every rank's ledger. `kept` is the value of --ledger.

    `by_purpose` has rank 0's calls and payload bytes, and sent bytes by rank, over all calls, also those without a row.
    """
    purposes = dict.fromkeys(purpose for ledger in ledgers for purpose in ledger["by_purpose"])
    found = {}
    for purpose in purposes:
        sums = [ledger["by_purpose"].get(purpose, (0, 0, 0, 0)) for ledger in ledgers]
        found[purpose] = {
            "calls": sums[0][0],
            "payload_bytes": sums[0][1],
            "bytes_sent": [each[2] for each in sums],
            "bytes_received": [each[3] for each in sums],
        }
    return {
        "kept": kept,
        "rows": [ledger["entered"] for ledger in ledgers],
        "rows_kept": [ledger["written"] for ledger in ledgers],
        "by_purpose": found,
    }


def without_rows(sums: Sums, rows: Iterable[Mapping[str, Any]]) -> Sums:
    """The sums of an epoch minus those of its earlier rows. An interrupted and continued epoch has several rows."""
    left = dict(sums)
    for row in rows:
        told = row.get("training") or {}
        terms = {"examples": told.get("examples", 0), **{name: told[name] for name in COUNTED if name in told}}
        terms |= {"seconds": round(1e9 * told.get("clock_seconds", 0))}
        terms |= {"wall_seconds": round(1e9 * told.get("wall_seconds", 0))}
        left |= {name: left.get(name, 0) - value for name, value in terms.items()}
    return left


def epoch_training(sums: Sums) -> dict[str, Any]:
    """An epoch's examples, its seconds by its iterations' clocks and by wall time, both rates, and its tokens or
    images, with their rate by wall time."""
    examples, clock = sums.get("examples", 0), sums.get("seconds", 0)
    wall = sums.get("wall_seconds", 0) + sums.get("wall_seconds_after", 0)
    counts = {name: sums[name] for name in COUNTED if name in sums}
    return {
        "examples": examples,
        "clock_seconds": clock / 1e9,
        "wall_seconds": wall / 1e9,
        **_rates(examples, clock, wall),
        **counts,
        **{f"{name}_per_second_wall": 1e9 * count / wall for name, count in counts.items() if wall},
    }


def wall_figures(sums: Sums) -> dict[str, float | None]:
    """The run's rates by clock and by wall time, from the sums after its warm-up, without the time after each epoch's
    last iteration. None without iterations."""
    clock, wall = sums.get("seconds", 0), sums.get("wall_seconds", 0)
    return _rates(sums.get("examples", 0), clock, wall) | {"share_off_the_clock": 1 - clock / wall if wall else None}


def _rates(examples: float, clock: float, wall: float) -> dict[str, float | None]:
    return {
        "examples_per_second_clock": 1e9 * examples / clock if clock else None,
        "examples_per_second_wall": 1e9 * examples / wall if wall else None,
    }


def epoch_traffic(ranks: Sequence[RankSums], epoch: int) -> dict[str, list[float | None]]:
    """An epoch's predicted and counted bytes by rank; counted is None unless the kernel has counted every iteration.

    *Predicted* is a rank's bytes by the ledger's formulas, in an iteration and after it, until the next one begins.
    It includes gradients, what the ranks agree on, the loss, and state that a checkpoint collects.
    (`bytes_sent_per_iteration` is only gradients and weights.) *Counted* is what the kernel counted meanwhile: on the
    interface, with the headers of every packet, or of own sockets. Both exclude evaluations, and what follows them
    until the next iteration. A sync settles an epoch's weights before its evaluation, so in the epoch's last iteration.

    If k ranks share an interface, its counters are the sum of all k: compare them with the sum of the k predictions.
    That needs one host per rank, or one host for all. Otherwise ranks on one host also exchange bytes that never reach
    the interface between the hosts. A GPU's own links are not included either.

    A rank that had no part in an epoch, because the run resumed with more or fewer ranks, moved no bytes in it.
    """
    sums = [rank.epoch(epoch) for rank in ranks]
    known = next((one for one in sums if one), None)
    if known is None:
        return {}

    def of_ranks(name: str, is_known: Callable[[Sums], bool]) -> list[float | None]:
        return [(one or {}).get(name, 0) if is_known(one or known) else None for one in sums]

    ways = ("sent", "received")
    predicted = {name: of_ranks(name, lambda _: True) for name in (f"predicted_bytes_{way}" for way in ways)}
    return predicted | {name: of_ranks(name, _is_counted) for name in (f"counted_bytes_{way}" for way in ways)}


def _is_counted(sums: Sums) -> bool:
    return sums.get("counted", 0) == sums.get("iterations", 0)


def wire_figures(ranks: Sequence[RankSums], interfaces: Sequence[Sequence[Any] | None]) -> dict[str, Any] | None:
    """The summary's "wire": means per iteration by rank, None for a rank that has not counted; None if none has.

    `interfaces`: the interface on which each rank has counted, as its name and ranks. `interface` and `shared_by_ranks`
    are those of the first rank that has counted. `ranks_by_interface` lists for all which ranks count together. Each
    list's counted bytes, which are equal, belong next to the sum of its predicted bytes.
    """
    found: dict[str, list[float | None]] = {}
    known = []
    for rank, interface in zip(ranks, interfaces, strict=True):
        sums = rank.run()
        counted = sums.get("counted", 0) if interface else 0
        if interface and counted:
            known.append(interface)
        for name in _WIRE:
            found.setdefault(name, []).append(sums.get(f"counted_{name}", 0) / counted if counted else None)
        for name in ("predicted_bytes_sent", "predicted_bytes_received"):
            found.setdefault(name, []).append(float(rank.mean(name)) if counted else None)
    if not known:
        return None
    return {
        "interface": known[0][0],
        "shared_by_ranks": len(known[0][1]),
        "ranks_by_interface": sorted({tuple(ranks) for _, ranks in known}),
        **{f"{name}_per_iteration": values for name, values in found.items()},
    }


def _added(parts: Sequence[Sums]) -> dict[str, float]:
    found: dict[str, float] = {}
    for sums in parts:
        for name, value in sums.items():
            found[name] = found.get(name, 0) + value
    return found


def _mean(sums: Sums, name: str) -> float | None:
    count, total = sums.get("iterations", 0), sums.get(name, 0)
    if not count:
        return None
    return total / count if total % count else total // count
