"""The JSON files of a checkpoint, field by field: the state of its training and of its record."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cos598d.records.conventions import COUNTED
from cos598d.records.kinds import (
    COUNT,
    FLAG,
    NOT_NEGATIVE,
    NUMBER,
    SIZE,
    TEXT,
    WHOLE,
    Fields,
    FixedList,
    ListOf,
    MapOf,
    Number,
    OrNone,
    Part,
    ValueKind,
)
from cos598d.records.run import ATTEMPT, EPOCH, ITERATION_FIELDS, ITERATION_OPTIONAL

# A strategy's state that is equal on all ranks: see `Strategy.scalars`.
SCALARS = Fields({}, {"loss_scale": Number("a number of at least 1", least=1), "good_steps": COUNT})
EARLY_STOPPING = Fields({"metric": TEXT, "best": OrNone(NUMBER), "best_iteration": COUNT, "waited": COUNT})

_COUNTERS = FixedList((COUNT,) * 4)  # bytes and packets, sent and received
_MONITOR = Fields({"seconds": NOT_NEGATIVE, "process_cpu_seconds": NUMBER, "total": _COUNTERS, "counted": _COUNTERS})
_LEDGER = Fields({"by_purpose": MapOf(FixedList((COUNT,) * 4)), "entered": COUNT, "written": COUNT})
_DETAIL = Fields(dict.fromkeys(("calls", "iterations", "spans", "wire"), FixedList((COUNT, WHOLE, FLAG))))
# The last row has what its sums need, even if its file does not.
_BYTES = dict.fromkeys(("predicted_bytes_sent", "predicted_bytes_received"), COUNT)
_BYTES |= {f"counted_{name}": OrNone(COUNT) for name in ("bytes_sent", "bytes_received", "packets_sent")}
_TOTALS = dict.fromkeys(("calls", "tensors", "payload_bytes", "bytes_sent", "bytes_received", "examples"), COUNT)
_WALL = dict.fromkeys(("wall_seconds", "wall_seconds_after"), NOT_NEGATIVE)
_ROW = Fields(
    {**ITERATION_FIELDS, "epoch": COUNT, **_WALL, **_TOTALS, **_BYTES, "counted_packets_received": OrNone(COUNT)},
    {**ITERATION_OPTIONAL, **dict.fromkeys(COUNTED, COUNT)},
)
# By epoch: sums of the warm-up, and of later iterations.
_SUMS = MapOf(ListOf(MapOf(WHOLE), count=2), "an object whose names are epochs", names=r"\d{1,18}")


def training_after(iteration: int) -> ValueKind:
    """The kind of a training that is saved after `iteration`: the part that is equal on all ranks."""
    fields = dict.fromkeys(("stepped", "evaluated", "epoch_iterations"), _up_to(iteration))
    position = Fields({**fields, "iteration": _exactly(iteration), "epoch_loss": NUMBER}, alone=True)

    def parts(value: dict[str, Any]) -> Iterator[Part]:
        yield from position.parts(value) if position.parts else ()
        if value["evaluated"] < iteration:  # what was not evaluated yet belongs to an unfinished epoch
            yield "epoch_iterations", value["epoch_iterations"], SIZE

    kinds = {"position": replace(position, parts=parts), "early_stopping": EARLY_STOPPING, "facts": Fields()}
    return Fields(kinds)


def facts_after(iteration: int, rank: int) -> ValueKind:
    """The kind of the facts of `rank` then: the position of its record, and on rank 0 what it has of others."""
    record = _record(_exactly(iteration))
    if rank == 0:
        departed = MapOf(Fields(_record(_up_to(iteration))), "an object whose names are ranks", r"0|[1-9]\d{0,4}")
        record |= {"epochs": ListOf(EPOCH), "attempts": ListOf(ATTEMPT), "departed": departed}
    return Fields({"record": Fields(record)})


def _record(iteration: ValueKind) -> dict[str, ValueKind]:
    sums = {"row": OrNone(_ROW), "sums": _SUMS, "ledger": _LEDGER, "detail": _DETAIL, "monitor": OrNone(_MONITOR)}
    return {"iteration": iteration, "files": MapOf(COUNT), **sums}


def _exactly(number: int) -> ValueKind:
    return Number(f"{number}", number, number, is_whole=True)


def _up_to(number: int) -> ValueKind:
    return Number(f"a whole number from 0 to {number}", 0, number, is_whole=True)
