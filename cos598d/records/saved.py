"""What a checkpoint's JSON files say of a run, field by field: where its training stood, and where its record did."""

from dataclasses import dataclass
from typing import Any

from cos598d.records.kinds import (
    COUNT,
    NOT_NEGATIVE,
    NUMBER,
    TEXT,
    WHOLE,
    Fields,
    FixedList,
    ListOf,
    MapOf,
    Number,
    OrNone,
    ValueKind,
    WrongValue,
)
from cos598d.records.run import ATTEMPT, EPOCH, ITERATION

# What the ranks know together of a strategy: see `Strategy.scalars`.
SCALARS = Fields({}, {"loss_scale": Number("a number of at least 1", least=1), "good_steps": COUNT})
EARLY_STOPPING = Fields({"metric": TEXT, "best": OrNone(NUMBER), "best_iteration": COUNT, "waited": COUNT})

# Of a record, what each of the parts that go on has summed up so far.
_BYTES = FixedList((COUNT, COUNT))  # sent and received
_COUNTERS = FixedList((COUNT,) * 4)  # bytes and packets, sent and received
_TRAFFIC_SUMS = Fields({"iterations": COUNT, "predicted": _BYTES, "known": COUNT, "counted": _COUNTERS})
_TRAFFIC = Fields(
    {
        "epochs": MapOf(_TRAFFIC_SUMS, "an object whose names are epochs", names=r"\d{1,18}"),
        "last": OrNone(FixedList((COUNT, _BYTES, OrNone(_COUNTERS)))),
    }
)
_WALL_SUMS = Fields({"wall": NUMBER, "clock": NUMBER, "examples": COUNT}, {"counts": OrNone(MapOf(COUNT))}, alone=True)
_TALLY = Fields(
    {
        "means": FixedList((ListOf(COUNT, count=2), ListOf(MapOf(WHOLE), count=2))),
        "traffic": _TRAFFIC,
        "wall": Fields({"iterations": COUNT, "epoch": _WALL_SUMS, "run": _WALL_SUMS}),
    }
)
_LEDGER = Fields({"by_purpose": MapOf(FixedList((COUNT,) * 4)), "entered": COUNT, "written": COUNT})
_THINNED = FixedList((COUNT, WHOLE, Number("0 or 1", is_whole=True, least=0, most=1)))
_DETAIL = Fields(dict.fromkeys(("calls", "iterations", "spans", "wire"), _THINNED))
_MONITOR = Fields({"seconds": NOT_NEGATIVE, "process_cpu_seconds": NUMBER, "total": _COUNTERS, "counted": _COUNTERS})

# The row of the last iteration, to which is still added; older checkpoints have it in the file of rows.
_ROW: dict[str, ValueKind] = {"row": OrNone(ITERATION)}


def training_after(iteration: int) -> ValueKind:
    """What a training is that is saved after `iteration`, all ranks' part of it."""
    return Fields({"position": _Position(iteration), "early_stopping": EARLY_STOPPING, "facts": Fields()})


def facts_after(iteration: int, rank: int) -> ValueKind:
    """What `rank` alone says then: where its part of the record stands, and on rank 0 what it has of others."""
    record = _record(_exactly(iteration))
    if rank == 0:
        departed = MapOf(
            Fields(_record(_up_to(iteration)), _ROW), "an object whose names are ranks", names=r"0|[1-9]\d{0,4}"
        )
        record |= {"epochs": ListOf(EPOCH), "attempts": ListOf(ATTEMPT), "departed": departed}
    return Fields({"record": Fields(record, _ROW)})


def _record(iteration: ValueKind) -> dict[str, ValueKind]:
    sums = {"tally": _TALLY, "ledger": _LEDGER, "detail": _DETAIL, "monitor": OrNone(_MONITOR)}
    return {"iteration": iteration, "files": MapOf(COUNT), **sums}


def _exactly(number: int) -> Number:
    return Number(f"{number}", is_whole=True, least=number, most=number)


def _up_to(number: int) -> Number:
    return Number(f"a whole number from 0 to {number}", is_whole=True, least=0, most=number)


@dataclass(frozen=True)
class _Position(ValueKind):
    """Where a training stands after `iteration`; what was not evaluated yet belongs to an epoch that is not over."""

    iteration: int

    @property
    def wanted(self) -> str:
        return "an object"

    def fits(self, value: Any) -> bool:
        return isinstance(value, dict)

    def check(self, value: Any) -> None:
        up_to = _up_to(self.iteration)
        fields: dict[str, ValueKind] = dict.fromkeys(("stepped", "evaluated", "epoch_iterations"), up_to)
        fields |= {"iteration": _exactly(self.iteration), "epoch_loss": NUMBER}
        Fields(fields, alone=True).check(value)
        if value["evaluated"] < self.iteration and not value["epoch_iterations"]:
            raise WrongValue(0, "a whole number of at least 1", "epoch_iterations")
