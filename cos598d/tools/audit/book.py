"""A rank's book: the trace of a script on one rank, as JSON. It has numbers and lines of code, never a verdict."""

from pathlib import Path
from typing import Any

from cos598d.errors import UserError
from cos598d.records.kinds import (
    COUNT,
    FLAG,
    NOT_NEGATIVE,
    NUMBER,
    TEXT,
    Fields,
    FixedList,
    ListOf,
    MapOf,
    Number,
    OneOf,
    OrNone,
    ValueKind,
)  # fmt: skip
from cos598d.records.kinds import (
    SIZE as AT_LEAST_ONE,
)
from cos598d.records.run import RANK, RANKS
from cos598d.records.schema import read
from cos598d.tools.audit.sketch import SIZE, from_text

GRADIENT, WEIGHT, BUFFER, SCALAR, OTHER, NOTHING = "gradient", "weight", "buffer", "scalar", "other", "nothing"
MOST_ROWS, MOST_ENTRIES, MOST_ITERATIONS = 2000, 4000, 20_000
ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
)
GATHER, SCATTER, ALL_TO_ALL, BARRIER, SEND, RECEIVE = "gather", "scatter", "all_to_all", "barrier", "send", "recv"
FORMAT = "cos598d audit 3"
BOOKS, BOOK, VERDICT = "books", "rank{rank}.json", "audit.json"
RUNNING, ENDED = "running", "ended"
REMEDY = "Audit the script again"
MOST_BYTES = 256 << 20

Book = dict[str, Any]


def _is_sketch(value: Any) -> bool:
    try:
        return isinstance(value, str) and len(from_text(value)) == SIZE
    except ValueError:
        return False


SKETCH = ValueKind(f"the text of a sketch of {SIZE} numbers", _is_sketch)
WHERE = FixedList((TEXT, COUNT, TEXT))
EXIT_CODE = Number("an exit code", is_whole=True, least=-255, most=255)
DIGESTS = ListOf(TEXT)
MICRO = Fields(
    {
        "size": COUNT,
        "samples": DIGESTS,
        "loss": OrNone(NUMBER),
        # How the loss scales its examples (watch/loss.py).
        "weight": OrNone(NUMBER),
        **dict.fromkeys(("counts", "multiplied", "divided"), ListOf(NUMBER)),
        "weights": TEXT,  # a fingerprint of the model's, when the pass begins
        "adds": FLAG,  # to gradients that an earlier pass of this step has left
        "modes": ListOf(COUNT),  # modules by their mode (watch/replica.py)
        "rng": TEXT,
        "where": WHERE,
        "event": COUNT,
    },
    {"kept": NOT_NEGATIVE},  # examples that a loss's mean does not ignore; 0 if that is not known
)
OPTIMIZER = Fields({"class": TEXT, "groups": ListOf(MapOf(NUMBER))})
EVENT = Fields(
    {"kind": OneOf(("clip", "call", "step")), "event": COUNT, "micro": COUNT, "where": WHERE},
    {
        **dict.fromkeys(("how", "op", "dtype"), TEXT),
        "limit": NUMBER,
        **dict.fromkeys(("norm", "factor"), OrNone(NUMBER)),
        "names": ListOf(TEXT),
        **dict.fromkeys(("elements", "root"), COUNT),
        "in_backward": FLAG,
        "carries": TEXT,
        "ranks": ListOf(RANK),
    },
)
STEP = Fields(
    {
        "iteration": AT_LEAST_ONE,
        "micro": ListOf(MICRO),
        "local": MapOf(ListOf(OrNone(SKETCH))),
        "local_parts": MapOf(ListOf(OrNone(ListOf(SKETCH)))),  # of what is cut over the ranks
        "places": MapOf(FixedList((COUNT, COUNT))),  # of what is applied among the parts, and their number
        **dict.fromkeys(("before", "state"), MapOf(SKETCH)),
        "applied": MapOf(SKETCH),
        "elements": MapOf(COUNT),  # of what is applied
        "events": ListOf(EVENT),
        "optimizers": ListOf(OPTIMIZER),
        **dict.fromkeys(("has_closure", "is_skipped"), FLAG),
        "seconds_after_gradients": NOT_NEGATIVE,
    },
    {
        "is_old": FLAG,  # whether the next backward pass finds this rank's part of the weights as before the step
        "in_shards": FLAG,  # whether the gradients that the optimizer steps by are only readable in parts
    },
)
_MOVED = dict.fromkeys(("payload_bytes", "bytes_sent", "bytes_received"), COUNT)
_CALL = {
    **dict.fromkeys(("op", "kind", "dtype"), TEXT),
    "names": ListOf(TEXT),
    **dict.fromkeys(("tensors", "elements", "ranks", "calls"), COUNT),
    **_MOVED,
    "where": WHERE,
    "in_backward": FLAG,
    "seconds": NOT_NEGATIVE,
}
CALL = Fields(_CALL | {"iteration": COUNT})
ENTRY = Fields(_CALL | {"first_iteration": COUNT})
ITERATION = Fields(
    {
        "losses": ListOf(NUMBER),
        "size": COUNT,
        "seconds": Number("a number above 0", least=0, is_above=True),
        "phases": MapOf(NOT_NEGATIVE),
        "totals": MapOf(FixedList((COUNT, COUNT, COUNT, COUNT, NOT_NEGATIVE))),
    },
    {"rates": ListOf(NUMBER)},  # the learning rates of its steps
)
RECENT = Fields(
    {
        "op": TEXT,
        "ranks": ListOf(RANK),
        **dict.fromkeys(("number", "elements", "root"), COUNT),
        "where": WHERE,
        "seconds": NOT_NEGATIVE,
        "waits": FLAG,
    }
)
MADE = Fields({"ranks": ListOf(RANK), "calls": COUNT})
STATE = Fields({}, dict.fromkeys(("weights", "parts", "buffers"), MapOf(SKETCH)))
_LENGTHS = dict.fromkeys(("dataset_length", "times"), COUNT)
LOADER = Fields(
    {"sampler": TEXT, "sampler_length": COUNT, "is_distributed": FLAG, "trains": FLAG, "where": WHERE} | _LENGTHS
)
SAMPLER = Fields(
    {
        "total_length": COUNT,
        **dict.fromkeys(("shuffles", "trains"), FLAG),
        "epochs": ListOf(COUNT),
        "where": WHERE,
    }
    | _LENGTHS
)
SUM = Fields(
    {"values": ListOf(NUMBER), **dict.fromkeys(("rows", "length", "share"), COUNT), "is_cut": FLAG, "where": WHERE}
)
MODEL = Fields(
    {},
    {
        **dict.fromkeys(("class", "sync", "dtype", "device"), TEXT),
        "wrappers": ListOf(TEXT),
        **dict.fromkeys(("parameters", "tensors", "batch_norms", "sharded", "cut_otherwise"), COUNT),
        "dropout": NUMBER,
    },
)
BOOK_KIND = Fields(
    {
        "format": OneOf((FORMAT,)),
        **dict.fromkeys(("run", "host", "script", "error", "failed", "stopped", "backend", "torch"), TEXT),
        "rank": RANK,
        "world_size": RANKS,
        "pid": COUNT,
        "state": OneOf((RUNNING, ENDED)),
        "exit_code": OrNone(EXIT_CODE),
        "at": WHERE,  # where the script was when it was asked to stop
        "is_in_torch": FLAG,  # then, in a call that may wait
        "recent": ListOf(RECENT),  # calls, then
        "made": ListOf(MADE),
        "examined": AT_LEAST_ONE,
        **dict.fromkeys(("seconds", "own_seconds", "own_after"), NOT_NEGATIVE),
        "iterations_seen": COUNT,
        "model": MODEL,
        "start": STATE,
        "end": STATE,
        "steps": ListOf(STEP),
        "calls": ListOf(CALL),
        "ledger": ListOf(ENTRY),
        "groups": ListOf(ListOf(RANK, least=1)),
        "iterations": ListOf(ITERATION),
        "training_samples": DIGESTS,
        "evaluation_samples": DIGESTS,
        **dict.fromkeys(("evaluated", "evaluation_batches"), COUNT),
        "loaders": ListOf(LOADER),
        "samplers": ListOf(SAMPLER),
        "counts": MapOf(COUNT),
        "saved": ListOf(Fields({"path": TEXT, "calls": COUNT, "where": WHERE})),  # with the calls before it
        "settings": ListOf(OPTIMIZER),  # at the last step
        "seed": Number("a seed", is_whole=True, least=-(2**63), most=2**64),
        "threads": AT_LEAST_ONE,
    },
    {
        "earlier": COUNT,  # worlds that the same command had opened before
        "sums": ListOf(SUM),  # of an evaluation
    },
)


def read_book(path: Path, rank: int) -> Book:
    """The book of `rank` in a file. Raises UserError for one that is damaged, forged or another rank's; OSError as
    `open`."""
    if path.stat().st_size > MOST_BYTES:
        raise UserError(f"{path} has more than {MOST_BYTES >> 20} MB, so it is no result of an audit. {REMEDY}.")
    book = read(path, BOOK_KIND, REMEDY, MOST_BYTES)
    if book["rank"] != rank or rank >= book["world_size"]:
        raise UserError(f"{path} is damaged: it is for rank {book['rank']} of {book['world_size']}. {REMEDY}.")
    return book


def ended_well(book: Book) -> bool:
    """Whether the script came to its end on a rank."""
    return book["state"] == ENDED and not book["exit_code"] and not book["error"]
