"""bench.json: what `cos598d bench` has measured, in rounds that each run every candidate once."""

from pathlib import Path
from typing import Any

from msgspec import Struct

from cos598d.errors import UserError
from cos598d.records.conventions import DDP, FLOOR
from cos598d.records.schema import AtLeastZero, Count, Environment, Positive, Ranks, Size, read
from cos598d.records.summary import SLOWEST

FILE_NAME = "bench.json"


class BenchSetting(Struct):
    """What was measured."""

    world_size: Ranks
    batch: Size  # examples on each rank
    model: str
    gradient_bytes: Count
    tokens: Count
    rounds: Size = 1
    step: bool = False
    precision: str = "fp32"
    precision_note: str = ""
    backend: str = "gloo"
    device: str = "cpu"
    threads_per_rank: Size = 1
    seconds_of: str = SLOWEST
    operations: AtLeastZero | None = None  # of an iteration
    peak_per_second: AtLeastZero | None = None


class Candidate(Struct):
    """A sync with options, and the name that it has in the other tables."""

    label: str
    sync: str = ""
    options: dict[str, Any] = {}
    bytes_from: str = "ledger"


class Ratio(Struct):
    """The median over the rounds of ratios within a round, and its 95 % interval, for which 6 rounds are needed."""

    median: Positive
    interval_95: tuple[float, float] | None = None


class Difference(Struct):
    """The same of differences within a round."""

    median: float
    interval_95: tuple[float, float] | None = None


class Measured(Struct):
    """A candidate's seconds per iteration. A figure is None if DDP, or the floor, was not measured."""

    seconds_median: Positive
    seconds_quartiles: tuple[Positive, Positive] | None = None
    seconds_exposed: float | None = None
    exposed_within_rounds: Difference | None = None
    ratio_to_ddp: Ratio | None = None
    ratio_to_floor: Ratio | None = None


class Traffic(Struct):
    """What a candidate has sent in an iteration, by rank."""

    payload_bytes: list[AtLeastZero]
    calls: list[Count] = []
    bytes_sent: list[AtLeastZero] = []


class Load(Struct):
    """A rank's machine while candidates were measured: how busy it was, and the rank's own processor seconds."""

    seconds: AtLeastZero
    process_cpu_seconds: float
    host_cpu_percent: AtLeastZero


class Bench(Struct):
    """What is read of a bench's record."""

    setting: BenchSetting
    environment: Environment
    candidates: list[Candidate]
    summary: dict[str, Measured] = {}
    traffic: dict[str, Traffic] = {}
    gradient_norm: dict[str, list[float | None]] = {}  # of the averaged gradient, by rank
    host: list[Load] = []
    bytes_are_assumed: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for a candidate without figures, or without those of DDP or the floor, if they are there."""
        labels = {one.label for one in self.candidates}
        for label in labels:
            if label not in self.summary or label not in self.traffic:
                raise ValueError(f"candidate {label} has no {'traffic' if label in self.summary else 'summary'}")
            found = self.summary[label]
            for base, figure in (
                (DDP, found.ratio_to_ddp),
                (FLOOR, found.ratio_to_floor),
                (FLOOR, found.seconds_exposed),
            ):
                if (figure is None) == (base in labels):
                    raise ValueError(f"candidate {label} has no figure against {base}, or {base} was not measured")


def read_bench(path: Path) -> tuple[Path, Bench]:
    """The file and the contents of a bench's record, from its folder or its file. Raises UserError."""
    file = path / FILE_NAME if path.is_dir() else path
    if not file.exists():
        raise UserError(f"{file} does not exist. Give a folder that `bench --output` has written.")
    return file, read(file, Bench, "Measure again")
