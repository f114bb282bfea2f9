"""The files of a run's folder: a struct for each. Decoding checks every field, and names the first wrong one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from cos598d.errors import UserError

# No true number is as large as 2**62, and every one below it can become a float.
Count = Annotated[int, Meta(ge=0, le=2**62)]
Size = Annotated[int, Meta(ge=1, le=2**62)]
AtLeastZero = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Ranks = Annotated[int, Meta(ge=1, le=65536)]
# Calls, and bytes of payload, sent and received.
Sums = tuple[Count, Count, Count, Count]
T = TypeVar("T")


class Iteration(Struct, omit_defaults=True):
    """A row of iterations.rankR.jsonl.

    Seconds are by the iteration's clock; of `wall_seconds`, from the end of the iteration before to this one's end, and
    `wall_seconds_after` until an evaluation, by wall time. `calls` to `bytes_received` are of gradients, and of weights
    that are held in shards: see `figures.totals`. `predicted_bytes_*` are of all calls in training, by the formulas of
    their algorithms; `counted_bytes_*` are the kernel's, or None. `by_purpose` has all calls since the row before,
    those of evaluations too.
    """

    iteration: Count
    loss: float
    seconds: Positive
    epoch: Count
    examples: Size
    seconds_data: float
    seconds_forward: float
    seconds_backward: float
    seconds_sync: float
    seconds_clip: float
    seconds_step: float
    seconds_checkpoint: float
    wall_seconds: float
    wall_seconds_after: float
    calls: Count
    payload_bytes: Count
    bytes_sent: Count
    bytes_received: Count
    predicted_bytes_sent: Count
    predicted_bytes_received: Count
    counted_bytes_sent: Count | None
    counted_bytes_received: Count | None
    by_purpose: dict[str, Sums]
    learning_rate: float | None = None
    tokens: Count | None = None
    images: Count | None = None
    # Each part of a phase: its name, its begin in seconds since the iteration's, and its seconds.
    spans_seconds: list[tuple[str, float, float]] = []


class Sample(Struct, omit_defaults=True):
    """A row of host.rankR.jsonl. `seconds` since training began, without the time between attempts."""

    seconds: AtLeastZero
    iteration: Count
    process_cpu_seconds: float
    host_cpu_percent: AtLeastZero
    rss_bytes: Count
    gpu_memory_bytes: Count | None = None
    gpu_utilization_percent: float | None = None


class AttemptRow(Struct, omit_defaults=True):
    """A row of attempts.jsonl: an attempt began after `iteration`, or ended after it.

    The row of a begin has `ranks` and how many iterations of the attempt before are lost; that of an end has `why`.
    """

    iteration: Count
    begun: str | None = None
    ranks: Ranks | None = None
    lost_iterations: Count = 0
    ended: str | None = None
    why: str | None = None


class Attempt(Struct):
    """One attempt of a run. `ended` and `why` are None while it runs, and if it was killed."""

    begun: str
    from_iteration: Count
    to_iteration: Count
    lost_iterations: Count  # those that a later attempt repeated
    ranks: Ranks
    ended: str | None = None
    why: str | None = None


class Network(Struct):
    """The links of an emulated cluster, as `cluster` was told them: "1gbit", "10ms"."""

    hosts: Size = 1
    rate: str | None = None
    delay: str | None = None


class Place(Struct):
    """Where a rank ran."""

    node: str = ""
    device: str = ""
    gpu: str | None = None


class Environment(Struct):
    """What figures depend on, of environment.json; a field that is not there is not known."""

    cores: Size | None = None
    ranks_on_host: Size = 1
    network: Network | None = None
    processor: str | None = None
    device: str = "cpu"
    threads_per_rank: Size | None = None
    tf32: bool | None = None
    commit: str | None = None
    versions: dict[str, str | None] = {}
    places: list[Place] = []


class Seconds(Struct):
    """The seconds of iterations after the warm-up; the first one by itself."""

    first: Positive | None
    counted: Count
    mean: Positive | None
    median: Positive | None
    p90: Positive | None
    interval_95: tuple[float, float] | None


class Purpose(Struct):
    """What calls of one purpose were and sent: rank 0's calls and payload, and bytes by rank."""

    calls: Count
    payload_bytes: Count
    bytes_sent: list[Count]
    bytes_received: list[Count]


class Wire(Struct):
    """What the kernel has counted per iteration of the connections of each rank."""

    bytes_sent_per_iteration: list[AtLeastZero | None]
    bytes_received_per_iteration: list[AtLeastZero | None]
    predicted_bytes_sent_per_iteration: list[AtLeastZero | None]

    def __post_init__(self) -> None:
        """Raise ValueError if lists are not of the same ranks."""
        if len(self.predicted_bytes_sent_per_iteration) != len(self.bytes_sent_per_iteration):
            raise ValueError("lists are not of as many ranks")


class Memory(Struct):
    """Bytes by rank: peaks of the process and its GPU, and tensors by category just before a step (`peak`)."""

    process_peak_bytes: Annotated[list[Count], Meta(min_length=1)]
    gpu_peak_bytes: list[Count | None] = []
    peak: list[dict[str, Count]] = []


class ClassScore(Struct):
    """How well an evaluation found one class."""

    name: str = field(name="class")
    examples: Count
    precision: AtLeastZero
    recall: AtLeastZero
    f1: AtLeastZero


class Training(Struct):
    """An epoch's training: its examples, and its seconds by wall time."""

    examples: Count
    wall_seconds: AtLeastZero


class Classes(Struct):
    """An evaluation by class. Row i, column j of `confusion` has the examples of class i that were taken for j."""

    by_class: list[ClassScore] = []
    confusion: list[list[Count]] = []

    def __post_init__(self) -> None:
        """Raise ValueError if a row, or a count in it, is missing."""
        if self.confusion and {len(self.confusion), *map(len, self.confusion)} != {len(self.by_class)}:
            raise ValueError("confusion does not have every class")


class Epoch(Classes, kw_only=True):
    """What every epoch's row has next to the task's metrics."""

    epoch: Count
    loss: float | None = None
    iterations: Count = 0
    is_cut: bool = False
    training: Training | None = None


class Setting(Struct, kw_only=True):
    """setting.json: what is known before a run begins."""

    task: str
    model: str
    data: str
    precision: str
    sync: str
    total_train_batch_size: Size
    max_seq_length: Size
    seed: int
    world_size: Ranks
    dropout: float | None = None
    label: str = ""
    backend: str = ""
    device: str = ""
    parameters: Count = 0
    bytes_from: Literal["ledger", "counters"] = "ledger"
    bytes_are_assumed: bool = False
    classes: list[str] | None = None
    auto: dict[str, Any] = {}  # the choice of --sync auto: `cost.tune.Choice`


class Summary(Setting, kw_only=True):
    """summary.json. Lists are by rank. Rows of epochs have what `Epoch` has, and a metric for each name of the task."""

    iterations: Count
    losses: list[float]
    seconds_per_iteration: Seconds
    phases: dict[str, float | None]
    calls_per_iteration: AtLeastZero
    payload_bytes_per_iteration: AtLeastZero
    bytes_sent_per_iteration: list[AtLeastZero]
    bytes_received_per_iteration: list[AtLeastZero]
    ledger: dict[str, dict[str, Purpose]] = {}
    wall: dict[str, float | None] = {}
    epochs: list[dict[str, Any]] = []
    evaluations: list[dict[str, Any]] = []
    attempts: list[Attempt] = []
    wire: Wire | None = None
    memory: Memory | None = None
    operations: dict[str, float | None] = {}
    unfinished: str = ""  # how far a run got that is at work, or has not ended well


def read(path: Path, kind: type[T], remedy: str = "Run it again") -> T:
    """The value of a JSON file. Raises UserError, with the first wrong field, for one that is not of this kind."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). Give the folder of a finished run.") from None
    except msgspec.DecodeError as error:
        raise UserError(f"{path} is damaged: {error}. {remedy}.") from None


def read_rows(path: Path, kind: type[T]) -> Iterator[T]:
    """The rows of a file; none if it does not exist. A last row that is being written, or never was, is left out.

    Raises UserError for a damaged row.
    """
    decode, number = msgspec.json.Decoder(kind).decode, 0
    try:
        with path.open("rb") as file:
            for line in file:
                number += 1
                if line.endswith(b"\n"):
                    yield decode(line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). Make it readable.") from None
    except msgspec.DecodeError as error:
        raise UserError(f"{path}, line {number} is damaged: {error}. Run it again.") from None
