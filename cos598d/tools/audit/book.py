"""A rank's book: the trace of a script on one rank, as JSON. It has numbers and lines of code, never a verdict."""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from typing_extensions import NotRequired, TypedDict  # which torch needs, too

from cos598d.errors import UserError, one_line

GRADIENT, WEIGHT, BUFFER, SCALAR, OTHER, NOTHING = "gradient", "weight", "buffer", "scalar", "other", "nothing"
MOST_ENTRIES, MOST_ITERATIONS = 4000, 20_000
BROADCAST, REDUCE, ALL_GATHER = "broadcast", "reduce", "all_gather"
GATHER, SCATTER, ALL_TO_ALL, BARRIER, SEND, RECEIVE = "gather", "scatter", "all_to_all", "barrier", "send", "recv"
FORMAT = "cos598d audit 7"
BOOKS, BOOK, VERDICT = "books", "rank{rank}.json", "audit.json"
RUNNING, ENDED = "running", "ended"
MOST_BYTES = 256 << 20

Book = dict[str, Any]

Count = Annotated[int, Meta(ge=0)]
Size = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
Where = tuple[str, Count, str]  # file, line, function
Sketch = Annotated[str, Meta(pattern="^[A-Za-z0-9+/]{171}=$")]  # 32 numbers of 4 bytes, in base64


class Micro(TypedDict):
    """A backward pass: its batch, and how its loss scales the examples (watch/loss.py)."""

    size: Count
    samples: list[str]
    weight: float | None
    examples: Seconds
    is_sum: bool
    multiplied: list[float]
    divided: list[float]
    scaler: float  # a gradient scaler's factor in the loss; 1 without one
    is_training: bool  # whether the model's module was in training mode
    rng: str
    where: Where
    event: Count


Optimizer = TypedDict("Optimizer", {"class": str, "groups": list[dict[str, float]]})


class Event(TypedDict):
    """A clip, a call or a step, in the order in which they came."""

    kind: Literal["clip", "call", "step"]
    event: Count
    micro: Count
    where: Where
    how: NotRequired[str]
    op: NotRequired[str]
    limit: NotRequired[float]
    norm: NotRequired[float | None]
    names: NotRequired[list[str]]
    elements: NotRequired[Count]
    root: NotRequired[Count]
    in_backward: NotRequired[bool]
    carries: NotRequired[str]
    ranks: NotRequired[list[Count]]


class Step(TypedDict):
    """An examined step: sketches of what the rank computed, and of what was applied."""

    iteration: Size
    micro: list[Micro]
    local: dict[str, list[Sketch | None]]
    before: dict[str, Sketch]
    applied: dict[str, Sketch]
    elements: dict[str, Count]  # of what is applied
    events: list[Event]
    has_closure: bool
    is_skipped: bool
    in_shards: bool  # whether the gradients that the optimizer steps by are only readable in parts


class Call(TypedDict):
    """The sums of all calls of one kind and line."""

    op: str
    kind: str
    dtype: str
    elements: Count
    ranks: Count
    calls: Count
    where: Where
    in_backward: bool
    first_iteration: Count


class Iteration(TypedDict):
    """What one optimizer step took."""

    losses: list[float]
    rates: list[float]  # the learning rates of its steps
    passes: Count  # backward passes
    begins_epoch: bool  # of the data, after the first backward pass


class Recent(TypedDict):
    """One of the last calls of a rank that has not ended."""

    op: str
    ranks: list[Count]
    number: Count
    elements: Count
    root: Count
    where: Where
    seconds: Seconds
    waits: bool


class Made(TypedDict):
    ranks: list[Count]
    calls: Count


State = dict[Literal["weights", "buffers"], dict[str, Sketch]]


class Unwaited(TypedDict):
    op: str
    where: Where
    iteration: Count


class Saved(TypedDict):
    path: str
    calls: Count
    where: Where  # with the calls before it


class Loader(TypedDict):
    """A loader of the script. `subset` is a digest of its data set's places, "" if that is no Subset."""

    sampler: str
    sampler_length: Count
    dataset_length: Count
    is_distributed: bool
    is_iterable: bool
    workers: Count
    subset: str
    times: Count
    trains: bool
    where: Where


class Sampler(TypedDict):
    """A DistributedSampler of the script; `whole_length` is that of the data set of which a Subset is a part."""

    dataset_length: Count
    whole_length: Count
    share: Count
    shuffles: bool
    subset: str
    epochs: list[Count]
    times: Count
    trains: bool
    where: Where


class Sum(TypedDict):
    """Numbers that an evaluation adds up over the ranks."""

    values: list[float]
    rows: Count
    length: Count
    share: Count
    is_cut: bool
    where: Where


class _Book(TypedDict):
    format: Literal["cos598d audit 7"]
    run: str
    host: str
    script: str
    error: str
    failed: str
    rank: Count
    world_size: Size
    earlier: Count  # worlds that the same command had opened before
    pid: Count
    state: Literal["running", "ended"]
    exit_code: Annotated[int, Meta(ge=-255, le=255)] | None
    at: Where  # where the script was, if it had not ended
    is_in_torch: bool  # then, in a call that may wait
    recent: list[Recent]  # calls, then
    made: list[Made]
    examined: Size
    seconds: Seconds
    own_seconds: Seconds
    iterations_seen: Count
    model: dict[str, str | int | float]
    start: State
    end: State
    steps: list[Step]
    ledger: list[Call]
    unwaited: list[Unwaited]  # calls that carried gradients
    groups: list[list[Count]]
    iterations: list[Iteration]
    training_samples: list[str]
    evaluation_samples: list[str]
    evaluation_batches: Count
    sums: list[Sum]
    loaders: list[Loader]
    samplers: list[Sampler]
    backwards: Count
    batches: Count
    saved: list[Saved]
    gathers: list[tuple[Count, Where]]  # sizes of what went into all-gathers, and their lines
    settings: list[Optimizer]  # at the first step of each


_DECODER = msgspec.json.Decoder(_Book)


def read_book(path: Path, rank: int) -> Book:
    """The book of `rank` in a file. Raises UserError for one that is damaged, forged or another rank's; OSError as
    `open`."""
    if path.stat().st_size > MOST_BYTES:
        raise UserError(
            f"{path} has more than {MOST_BYTES >> 20} MB, so it is no result of an audit. Audit the script again."
        )
    try:
        book: Any = _DECODER.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {one_line(error)}. Audit the script again.") from None
    if book["rank"] != rank or rank >= book["world_size"]:
        raise UserError(
            f"{path} is damaged: it is for rank {book['rank']} of {book['world_size']}. Audit the script again."
        )
    return book


def ended_well(book: Book) -> bool:
    """Whether the script came to its end on a rank."""
    return book["state"] == ENDED and not book["exit_code"] and not book["error"]
