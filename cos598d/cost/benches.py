"""The parts of a bench's record that the model uses, and reasons why it cannot use a record."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cos598d.cost.model import Compute, Link
from cos598d.errors import UserError
from cos598d.records.bench import read_record
from cos598d.records.conventions import FLOOR
from cos598d.records.quantities import parse_delay, parse_rate
from cos598d.sync.estimate import Tensor
from cos598d.terminal.words import number_of

# Records of the same work share these. Batch, ranks and links may differ, since the model covers them.
SAME_WORK = ("model", "task", "gradient_bytes", "tokens", "step", "precision", "backend", "device", "threads_per_rank")


@dataclass(frozen=True)
class Rung:
    """A sync as a bench measured it. `bytes_sent` is the mean over the ranks, `seconds` the median."""

    label: str
    sync: str
    options: dict[str, Any]
    seconds: float
    calls: int
    payload_bytes: int
    bytes_sent: float


@dataclass(frozen=True)
class BenchSeconds:
    """A bench's record. `crowd`: ranks per core of the machine that they share, at least 1.

    `offload`: "on" or "off" for an emulated cluster that reports it, else None.
    """

    name: str
    work: dict[str, Any]
    ranks: int
    link: Link
    batch: int
    crowd: float
    compute: Compute
    tensors: tuple[Tensor, ...]
    rungs: tuple[Rung, ...]
    offload: str | None = None

    @property
    def words(self) -> str:
        """Its difference from the others as a phrase: "4 ranks, links of 1gbit, batch 8"."""
        return f"{number_of(self.ranks, 'rank')}, links of {self.link.words}, batch {self.batch}"


def load_records(paths: Sequence[Path]) -> list[BenchSeconds]:
    """The records in these folders (or files). Raises UserError for one that does not fit the first."""
    records = [load_record(path) for path in paths]
    for record in records:
        for name in SAME_WORK:
            if record.work[name] != records[0].work[name]:
                raise UserError(
                    f"{record.name} and {records[0].name} do not measure the same work ({name}: {record.work[name]} "
                    "and "
                    f"{records[0].work[name]}). Give benches that differ only in rate, delay, batch and ranks."
                )
        if {record.offload, records[0].offload} == {"on", "off"}:
            raise UserError(
                f"{record.name} and {records[0].name} differ in --offload, which the cost model ignores. Give "
                "benches with the same."
            )
    return records


def load_record(path: Path) -> BenchSeconds:
    """The record in a bench's folder, or in a JSON file. Raises UserError if it cannot be used."""
    file, found = read_record(path)
    if not found["candidates"]:
        raise UserError(f"{file} has no syncs, only a sweep of messages. Measure with `bench --sync`.")
    labels = [candidate.get("label") for candidate in found["candidates"]]
    if FLOOR not in labels:
        raise UserError(f"{file} has no measurement without communication (sync {FLOOR}). Measure without --alone.")
    if "arrivals" not in found:
        raise UserError(f"{file} is of an older version, without the arrival times of gradients. Measure again.")
    try:
        return _record(str(path), found)
    except (KeyError, TypeError, IndexError, AttributeError, statistics.StatisticsError) as error:
        raise UserError(f"{file} is damaged ({type(error).__name__} {error}). Measure again.") from None


def _record(name: str, found: dict[str, Any]) -> BenchSeconds:
    # The first benches always computed in fp32.
    setting, environment = {"precision": "fp32"} | found["setting"], found["environment"]
    ranks, network = setting["world_size"], environment["network"]
    if network and network["hosts"] != ranks:
        raise UserError(
            f"{name} has {ranks} ranks on {network['hosts']} hosts: the cost model needs one rank per host. Measure "
            "with one rank on each host."
        )
    # An emulated cluster's hosts share this machine's cores.
    together = ranks if network else environment["ranks_on_host"]
    rungs = []
    for candidate in found["candidates"]:
        label = candidate["label"]
        traffic = found["traffic"][label]
        rungs.append(
            Rung(
                label,
                candidate["sync"],
                candidate["options"],
                found["summary"][label]["seconds_median"],
                max(traffic["calls"]),
                max(traffic["payload_bytes"]),
                statistics.fmean(traffic["bytes_sent"]),
            )
        )
    return BenchSeconds(
        name=name,
        work={key: setting[key] for key in SAME_WORK},
        ranks=ranks,
        link=Link(parse_rate(network["rate"]), parse_delay(network["delay"])) if network else Link(),
        batch=setting["batch"],
        crowd=max(1.0, together * setting["threads_per_rank"] / environment["cores"]),
        compute=_compute(found),
        tensors=tuple(
            Tensor(tensor["name"], tuple(tensor["shape"]), tensor["dtype"], tensor["bytes"])
            for tensor in found["arrivals"]["tensors"]
        ),
        rungs=tuple(rungs),
        offload=network.get("offload") if network else None,
    )


def _compute(found: dict[str, Any]) -> Compute:
    """The floor's phases. The arrival times come from separate passes, and are scaled to the floor's backward."""
    floor = [sample for sample in found["samples"] if sample["candidate"] == FLOOR]
    seconds = found["summary"][FLOOR]["seconds_median"]

    def phase(name: str) -> float:
        return statistics.median(statistics.fmean(sample[f"seconds_{name}_by_rank"]) for sample in floor)

    backward = min(phase("backward"), seconds)
    before = min(phase("forward"), seconds - backward)
    arrivals = found["arrivals"]
    stretch = backward / arrivals["backward_seconds"]
    moments = {
        tensor["name"]: backward if tensor["seconds"] is None else min(backward, tensor["seconds"] * stretch)
        for tensor in arrivals["tensors"]
    }
    return Compute(before, backward, seconds - backward - before, moments)
