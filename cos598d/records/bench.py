"""bench.json: what `cos598d bench` has measured, in rounds that each run every candidate once."""

from pathlib import Path
from typing import Any

from msgspec import Struct

from cos598d.errors import UserError
from cos598d.records.schema import AtLeastZero, Count, Environment, Positive, Ranks, Size, read

FILE_NAME = "bench.json"


class BenchSetting(Struct):
    """What was measured. Benches that differ only in ranks, links and batch measure the same work."""

    world_size: Ranks
    batch: Size | None = None  # examples on each rank
    model: str | None = None
    task: str | None = None
    gradient_bytes: Count | None = None
    tokens: Count | None = None
    step: bool = False
    precision: str = "fp32"
    backend: str = "gloo"
    device: str = "cpu"
    threads_per_rank: Size = 1


class Candidate(Struct):
    """A sync with options, and the name that it has in the other tables."""

    label: str
    sync: str = ""
    options: dict[str, Any] = {}


class Measured(Struct):
    """A candidate's seconds per iteration."""

    seconds_median: Positive


class Traffic(Struct):
    """What a candidate has sent in an iteration, by rank."""

    payload_bytes: list[AtLeastZero]


class Turn(Struct):
    """A candidate's turn in a round: seconds by rank, where it has such parts."""

    candidate: str
    seconds_forward_by_rank: list[AtLeastZero] = []
    seconds_backward_by_rank: list[AtLeastZero] = []


class Arrival(Struct):
    """A trainable tensor, in the model's order, and when backward has its gradient (None: never)."""

    name: str
    shape: list[Count]
    dtype: str
    bytes: Count
    seconds: AtLeastZero | None


class Arrivals(Struct):
    """When the gradients are there, in seconds from backward's begin."""

    backward_seconds: Positive
    tensors: list[Arrival]


class Bench(Struct):
    """What is read of a bench's record. Without candidates it has only sizes of messages."""

    setting: BenchSetting
    environment: Environment
    candidates: list[Candidate]
    summary: dict[str, Measured] = {}
    traffic: dict[str, Traffic] = {}
    samples: list[Turn] = []
    arrivals: Arrivals | None = None


def read_bench(path: Path) -> tuple[Path, Bench]:
    """The file and the contents of a bench's record, from its folder or its file. Raises UserError."""
    file = path / FILE_NAME if path.is_dir() else path
    if not file.exists():
        raise UserError(f"{file} does not exist. Give a folder that `bench --output` has written.")
    return file, read(file, Bench, "Measure again")
