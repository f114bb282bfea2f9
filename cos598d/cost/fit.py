"""The costs that best explain the measurements, and what they predict."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from cos598d.cost.benches import BenchSeconds, Rung
from cos598d.cost.calls import overlaps, plan_calls, reason_left_out
from cos598d.cost.model import CallArrays, Compute, Costs, Link, arrange, computes_by_batch, iteration_seconds
from cos598d.errors import UserError
from cos598d.records.conventions import FLOOR
from cos598d.records.fit import TOLERATED_RESIDUAL

# The fit's starting point, and the result for costs that the records do not determine. TCP's headers leave some 95 %
# for the payload.
START = {"call_seconds": 3e-4, "step_seconds": 1e-4, "processor_seconds_per_byte": 5e-10}
EFFICIENCY = 0.95
# Regularization widths, for logarithms: weak enough to matter only for costs that the records do not determine. The
# link's efficiency is nearly known; a codec's seconds are relative to iterations.
LOG_WIDTH, EFFICIENCY_WIDTH, CODEC_WIDTH = 300.0, 16.0, 8.0


class Observation(NamedTuple):
    """A sync in a record."""

    record: BenchSeconds
    rung: Rung
    calls: CallArrays


@dataclass(frozen=True)
class Fitted:
    """The costs, the records they were fitted to, and what could not be fitted."""

    costs: Costs
    records: tuple[BenchSeconds, ...]
    rungs: dict[str, tuple[Rung, BenchSeconds]]  # by label, with the record that it comes from
    left_out: dict[str, str]
    remarks: tuple[str, ...]

    @property
    def base(self) -> list[BenchSeconds]:
        """The records whose floor gives the hosts' compute: those with the most ranks, as they may share a machine."""
        most = max(record.ranks for record in self.records)
        return [record for record in self.records if record.ranks == most]

    @property
    def steals(self) -> bool:
        """Whether calls use the processor that computes."""
        return self.records[0].work["device"] == "cpu"

    def compute(self, batch: int) -> tuple[Compute, float]:
        """The compute of `batch` examples on a host, and the part of its seconds that does not grow with them."""
        of_batch: dict[int, list[Compute]] = {}
        for record in self.base:
            of_batch.setdefault(record.batch, []).append(record.compute)
        return computes_by_batch({size: _typical(found) for size, found in of_batch.items()}, batch)

    def predict(self, label: str, hosts: int, link: Link, batch: int, on: BenchSeconds | None = None) -> float:
        """Seconds per iteration of the sync `label`. `on`: use that record's compute and its ranks per core."""
        rung, record = self.rungs[label]
        compute, crowd = (on.compute, on.crowd) if on else (self.compute(batch)[0], self.base[0].crowd)
        calls, costs = arrange(plan_calls(rung, record, hosts, batch), compute, crowd), self.costs.crowded(crowd)
        return iteration_seconds(label, calls, compute, link, costs, overlaps(rung), self.steals)


def fit(records: Sequence[BenchSeconds]) -> Fitted:
    """Robust least squares (soft L1) over the relative residuals of all built-in syncs in all records.

    The costs are fitted as logarithms and shared by all syncs. The link's efficiency needs two rates. A codec's seconds
    are its own. Raises UserError if no record has a sync that sends anything.
    """
    rungs: dict[str, tuple[Rung, BenchSeconds]] = {}
    left_out: dict[str, str] = {}
    seen: list[Observation] = []
    for record in records:
        for rung in record.rungs:
            reason = reason_left_out(rung)
            if reason:
                left_out[rung.label] = reason
                continue
            rungs.setdefault(rung.label, (rung, record))
            if rung.sync != FLOOR and record.ranks > 1:
                calls = arrange(plan_calls(rung, record, record.ranks, record.batch), record.compute, record.crowd)
                seen.append(Observation(record, rung, calls))
    if not seen:
        raise UserError("no bench has a sync that sends something and can be modelled. Measure with 2 ranks or more.")
    rates = {record.link.rate for record in records}
    coded = list(dict.fromkeys(one.rung.label for one in seen if one.rung.options.get("compress")))
    space = _Space(coded, fits_efficiency=len(rates) > 1)
    steals = records[0].work["device"] == "cpu"
    measured = np.array([observation.rung.seconds for observation in seen])
    scale = statistics.fmean(observation.record.compute.seconds for observation in seen)

    def residuals(point: np.ndarray) -> np.ndarray:
        costs = space.costs(point, scale)
        of_crowd = {record.crowd: costs.crowded(record.crowd) for record in records}
        predicted = [
            iteration_seconds(
                rung.label, calls, record.compute, record.link, of_crowd[record.crowd], overlaps(rung), steals
            )
            for record, rung, calls in seen
        ]
        return np.concatenate([np.array(predicted) / measured - 1, space.restraint(point)])

    best = least_squares(residuals, np.zeros(space.size), loss="soft_l1", f_scale=TOLERATED_RESIDUAL)
    return Fitted(space.costs(best.x, scale), tuple(records), rungs, left_out, tuple(_remarks(records, rates)))


class _Space:
    """A point of the optimizer as costs: logarithms relative to START, a codec's seconds relative to a scale."""

    def __init__(self, coded: Sequence[str], fits_efficiency: bool):
        self._coded, self._shared = list(coded), len(START) + fits_efficiency
        self._fits_efficiency = fits_efficiency
        widths = [LOG_WIDTH] * len(START) + [EFFICIENCY_WIDTH] * fits_efficiency + [CODEC_WIDTH] * len(coded)
        self.size, self._widths = len(widths), np.array(widths)

    def costs(self, point: np.ndarray, scale: float) -> Costs:
        factors = np.exp(np.clip(point[: self._shared], -30, 30))
        shared = {name: start * float(factors[i]) for i, (name, start) in enumerate(START.items())}
        efficiency = EFFICIENCY * float(factors[-1]) if self._fits_efficiency else EFFICIENCY
        seconds = dict(zip(self._coded, (point[self._shared :] * scale).tolist(), strict=True))
        return Costs(**shared, efficiency=efficiency, codec_seconds=seconds)

    def restraint(self, point: np.ndarray) -> np.ndarray:
        return point / self._widths


def _typical(found: Sequence[Compute]) -> Compute:
    """The compute with the median seconds, or the mean of the two in the middle."""
    wanted = statistics.median(compute.seconds for compute in found)
    nearest = min(found, key=lambda compute: abs(compute.seconds - wanted))
    return nearest.scaled(wanted / nearest.seconds)


def _remarks(records: Sequence[BenchSeconds], rates: set[float | None]) -> list[str]:
    remarks = []
    if len(rates) < 2:
        remarks.append(
            f"all benches have the same rate, so the link's efficiency is assumed to be {EFFICIENCY:.0%}, not fitted"
        )
    if len({record.batch for record in records}) == 1:
        remarks.append("all benches have the same batch, so compute is assumed to grow in proportion to the batch")
    if len({record.ranks for record in records}) == 1:
        remarks.append(f"all benches have {records[0].ranks} hosts; other numbers of hosts are from the formulas")
    return remarks
