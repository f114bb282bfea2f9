"""Messages that ranks really sent: each end as its own rank noted it, and the two ends put together."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

NETWORK, MEMORY = "network", "memory"


@dataclass(frozen=True)
class MessageEnd:
    """One end of a message, as its rank saw it. Moments are seconds on one clock that all ranks of a host share.

    begin       the first element of the collective's tensor that is sent, or that is written over by what comes; None
                for what comes in beside the tensor, to be added to it
    elements    how many there are
    tag         messages of one tag, between two ranks, arrive in the order in which they were sent
    started     when the rank began to send, or said that it was ready
    ended       when it had waited for the message
    """

    rank: int
    peer: int
    tensor: str
    is_sent: bool
    begin: int | None
    elements: int
    bytes: int
    tag: int
    started: float
    ended: float


@dataclass(frozen=True)
class Message:
    """Elements [begin, end) of a tensor on their way from one rank to another.

    `adds`: whether the receiver adds them to its own; else they take the place of its own. `medium` is the NETWORK, or
    the MEMORY that the ranks share: then the receiver reads them where they are. Moments, on one clock: `sent` when the
    sender began, `left` when it went on, `expected` when the receiver was ready, `arrived` when it went on.
    """

    tensor: str
    sender: int
    receiver: int
    begin: int
    end: int
    bytes: int
    adds: bool
    sent: float
    left: float
    expected: float
    arrived: float
    medium: str = NETWORK

    def overlaps(self, other: "Message") -> bool:
        """Whether both carry some element."""
        return self.begin < other.end and other.begin < self.end


def join_ends(ends: Iterable[MessageEnd]) -> list[Message]:
    """The messages of which these are the ends, in order of sending.

    Raises ValueError where an end is alone, or lands elsewhere than where it comes from: that is no all-reduce.
    """
    sent: dict[tuple, list[MessageEnd]] = defaultdict(list)
    received: dict[tuple, list[MessageEnd]] = defaultdict(list)
    for end in ends:
        sender, receiver = (end.rank, end.peer) if end.is_sent else (end.peer, end.rank)
        (sent if end.is_sent else received)[end.tensor, end.tag, sender, receiver].append(end)
    messages = []
    for key in sorted({*sent, *received}):
        tensor, _, sender, receiver = key
        if len(sent[key]) != len(received[key]):
            raise ValueError(
                f"rank {sender} sent {len(sent[key])} messages of {tensor} to rank {receiver}, "
                f"which received {len(received[key])}"
            )
        messages += [_message(out, come) for out, come in zip(sent[key], received[key], strict=True)]
    return sorted(messages, key=lambda message: (message.sent, message.sender, message.receiver))


def _message(out: MessageEnd, come: MessageEnd) -> Message:
    if out.begin is None or out.elements != come.elements or come.begin not in (None, out.begin):
        raise ValueError(
            f"what rank {out.rank} sent of {out.tensor} to rank {come.rank} is not what is in that place there"
        )
    return Message(
        tensor=out.tensor,
        sender=out.rank,
        receiver=come.rank,
        begin=out.begin,
        end=out.begin + out.elements,
        bytes=out.bytes,
        adds=come.begin is None,
        sent=out.started,
        left=out.ended,
        expected=come.started,
        arrived=come.ended,
    )


@dataclass(frozen=True)
class Shared:
    """What one rank did with a buffer in memory that the ranks share: when it had filled its own, added up its part of
    all, elements [begin, end), into the result, and copied the result."""

    rank: int
    tensor: str
    begin: int
    end: int
    element_bytes: int
    filled: float
    added: float
    copied: float


def join_shared(notes: Sequence[Shared]) -> list[Message]:
    """What each rank read that another had written, as messages: to add up its own part, and the others' sums."""
    messages = []
    for reader in notes:
        for writer in notes:
            if reader.rank == writer.rank or reader.tensor != writer.tensor:
                continue
            for part, adds, sent, arrived in (
                (reader, True, writer.filled, reader.added),
                (writer, False, writer.added, reader.copied),
            ):
                if part.begin < part.end:
                    size = (part.end - part.begin) * part.element_bytes
                    ready = reader.filled if adds else reader.added
                    place = (part.tensor, writer.rank, reader.rank, part.begin, part.end)
                    messages.append(Message(*place, size, adds, sent, arrived, ready, arrived, MEMORY))
    return sorted(messages, key=lambda message: (not message.adds, message.sender, message.receiver))


def to_json(notes: Iterable[MessageEnd | Shared]) -> list[dict[str, Any]]:
    """The notes of a rank as JSON."""
    return [asdict(note) for note in notes]
