"""What every rank of a lesson's world did and when, as rows: pictures are drawn from them, and checks count them."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from cos598d.tools.check.notes import LONGEST_NAME

COMPUTE, CALL, SEND, RECEIVE, WAIT = KINDS = ("compute", "call", "send", "receive", "wait")
MOST_EVENTS = 20_000  # of one rank


@dataclass(frozen=True)
class Event:
    """One stretch of one rank's time. Moments are seconds on one clock that all ranks of a host share, `start` first.

    kind        compute: forward, or backward up to a gradient; call: a collective, from its start to the end of waiting
                for it; send and receive: a message, likewise; wait: the part of one of these in which the rank stood
                still, where it did not wait from the start
    name        of what is computed ("backward of hidden.weight"), else of the call ("all_reduce of bucket 0")
    bytes       payload of a call or a message; 0 for compute and wait
    peer        the rank at a message's other end, or a collective's root; None where there is none
    tensors     names of the tensors that are computed or travel
    """

    rank: int
    kind: str
    name: str
    start: float
    end: float
    bytes: int
    peer: int | None
    tensors: tuple[str, ...]


def to_rows(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The events as JSON."""
    return [asdict(event) | {"tensors": list(event.tensors)} for event in events]


def from_rows(rows: Any) -> list[Event]:
    """The events in rows of `to_rows`, in order of start. Raises ValueError for other rows: a student's process wrote
    them."""
    if not isinstance(rows, list) or len(rows) > MOST_EVENTS or not all(map(_is_row, rows)):
        raise ValueError("these are no rows of events")
    events = [Event(**row | {"tensors": tuple(row["tensors"])}) for row in rows]
    return sorted(events, key=lambda event: event.start)


def before(events: Sequence[Event], moment: float, *kinds: str) -> list[Event]:
    """Those of these kinds that start before the moment."""
    return [event for event in events if event.kind in kinds and event.start < moment]


_NAMES = {field.name for field in fields(Event)}


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or set(row) != _NAMES or row["kind"] not in KINDS:
        return False
    counts = [row["rank"], row["bytes"], *([] if row["peer"] is None else [row["peer"]])]
    times, names = (row["start"], row["end"]), (row["name"], *_list(row["tensors"]))
    return (
        isinstance(row["tensors"], list)
        and all(type(count) is int and count >= 0 for count in counts)
        and all(type(time) is float and time < float("inf") for time in times)
        and times[0] <= times[1]
        and all(type(name) is str and len(name) <= LONGEST_NAME for name in names)
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
