"""The events of a run's typical iteration, from its record."""

from pathlib import Path

from cos598d.errors import UserError
from cos598d.records.conventions import COMMUNICATION, ITERATIONS
from cos598d.records.run import ITERATION, read_table
from cos598d.terminal.words import number_of
from cos598d.tools.learn.events import CALL, COMPUTE, LONGEST_NAME, Event
from cos598d.tools.learn.picture.lanes import MOST_RANKS
from cos598d.tools.report.load import Row, load_run_as
from cos598d.tools.report.numbers import is_number
from cos598d.tools.report.series import find_calls, read_calls

TRAVELS = ("gradients", "parameters")
NOT_COMPUTED = ("sync",)


def events_of_run(folder: Path) -> tuple[list[Event], str]:
    """The events of every rank in the run's typical iteration, and a note on them.

    A record tells a rank's moments from its own beginning of the iteration. Raises UserError where it tells none.
    """
    run = load_run_as(folder, folder.resolve().name)
    if run.typical is None or not run.typical.get("spans_seconds"):
        raise UserError(f"{folder} does not have the times at which phases began. Give the folder of a newer run.")
    iteration, ranks = run.typical["iteration"], run.summary["world_size"]
    events: list[Event] = []
    untimed = 0
    for rank in range(min(ranks, MOST_RANKS)):
        events += _computed(rank, _row(folder / ITERATIONS.format(rank=rank), iteration))
        path = folder / COMMUNICATION.format(rank=rank)
        for call in read_calls(path, find_calls(path).get(iteration, [])):
            if call["purpose"] not in TRAVELS:
                continue
            if is_number(call.get("started")) and is_number(call.get("seconds")):
                events.append(_call(rank, call))
            else:
                untimed += rank == 0
    note = f"This is iteration {iteration}. Each rank's time starts at 0 when that rank begins it."
    if untimed:
        note += f" On each rank a library made {number_of(untimed, 'call')} whose times are not known."
    if ranks > MOST_RANKS:
        note += f" {number_of(ranks - MOST_RANKS, 'more rank')} not drawn."
    return events, note


def _row(path: Path, iteration: int) -> Row:
    for row in read_table(path, ITERATION):
        if row["iteration"] == iteration:
            return row
    raise UserError(f"{path} has no iteration {iteration}, which rank 0 has. These files are not from one run.")


def _computed(rank: int, row: Row) -> list[Event]:
    return [
        Event(rank, COMPUTE, phase, float(start), float(start + max(0.0, length)), 0, None, ())
        for phase, start, length in row.get("spans_seconds", ())
        if phase not in NOT_COMPUTED
    ]


def _call(rank: int, call: Row) -> Event:
    start, payload = float(call["started"]), call.get("payload_bytes")
    name, tensor = f"{call['op']} of {call['tensor']}"[:LONGEST_NAME], call["tensor"][:LONGEST_NAME]
    count = payload if type(payload) is int and payload >= 0 else int(call["bytes_sent"])
    return Event(rank, CALL, name, start, start + max(0.0, float(call["seconds"])), count, None, (tensor,))
