"""What a lesson's file did while it was recorded, from what its ranks handed in: events, and messages, if any."""

from collections.abc import Sequence
from dataclasses import dataclass

from cos598d.tools.check.evidence import BadEvidence, Evidence
from cos598d.tools.learn.events import Event, from_rows
from cos598d.tools.learn.picture.messages import Message
from cos598d.tools.learn.picture.probe import messages_of

RECORD = "record"  # the name of what is recorded for a picture, beside the checks' own


@dataclass(frozen=True)
class Recorded:
    """All ranks' events, in order of start; the messages of one all-reduce, if the lesson has any, in order of sending.

    `unsaid` is why there are none although some were sent.
    """

    events: list[Event]
    messages: list[Message]
    unsaid: str = ""


def recorded(evidence: Sequence[Evidence]) -> Recorded:
    """What the ranks handed in, in order of rank. Raises BadEvidence, or ValueError, for what cannot be read."""
    events: list[Event] = []
    for each in evidence:
        events += [row for row in from_rows(each.reported(RECORD, "events", list)) if row.rank == each.rank]
    events.sort(key=lambda event: event.start)
    try:
        notes = [each.reported(RECORD, "messages", dict) for each in evidence]
    except BadEvidence:  # a lesson without messages
        return Recorded(events, [])
    try:
        return Recorded(events, messages_of(notes))
    except ValueError as error:
        return Recorded(events, [], str(error))
