"""A picture's words: sizes and times in few letters, and in a sentence how one timeline differs from another."""

from collections.abc import Callable, Sequence

from cos598d.terminal.printable import printable
from cos598d.terminal.words import listed, number_of
from cos598d.tools.learn.picture.lanes import MESSAGE, MOST_ROWS, DrawnCollective, RankTimelines, computed_beside
from cos598d.tools.report.numbers import plain
from cos598d.tools.report.svg import shortened

LONGEST_NAME = 40


def size(count: int) -> str:
    """Bytes as "12 B", "98.4 kB", "1.57 MB", in thousands."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{plain(count / unit)} {name}"
    return f"{count} B"


def time(seconds: float) -> str:
    """Seconds as "0.24 ms", "12.3 ms", "2.56 s"."""
    return f"{plain(seconds)} s" if seconds >= 1 else f"{plain(1e3 * seconds)} ms"


def name_of(text: str, letters: int = LONGEST_NAME) -> str:
    """A tensor's or a call's name, which may be hostile, as one short piece of text."""
    return shortened(printable(text, 10 * letters), letters)


def ranks_named(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 0, 2 and 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed([str(rank) for rank in ranks])}"


def of_meeting(meeting: DrawnCollective) -> str:
    """A call in a line: its bytes, and who waited for whom."""
    words = f"{name_of(meeting.name)}, {size(meeting.bytes)}"
    if meeting.missing:
        here = ranks_named(sorted(meeting.entered))
        return f"{words}: {here} waited, and {ranks_named(meeting.missing)} never made this call"
    if not meeting.longest_wait:
        return words
    return f"{words}: rank {meeting.last} came last, {time(meeting.longest_wait)} after rank {meeting.first}"


def left_out(line: RankTimelines) -> list[str]:
    """What the lanes of a timeline do not show, a line each."""
    words = [f"{number_of(line.left_out, 'more rank')} not drawn"] if line.left_out else []
    if any(lane.is_crowded for lane in line.lanes):
        words.append(f"a rank's last row shows everything beyond {MOST_ROWS} at once")
    return words


def reading(parts: Sequence[RankTimelines]) -> str:
    """How to read lanes: what a rank's rows are, what a gap means, and what the numbers on calls are."""
    numbered = any(line.meetings for line in parts)
    others = any(
        bar.kind == MESSAGE or not bar.number
        for line in parts
        for lane in line.lanes
        for row in lane.rows
        for bar in row
    )
    words = "A rank's first row shows when it computes."
    if numbered or others:
        kinds = " and ".join([*(["calls"] if numbered else []), *(["messages"] if others else [])])
        words += f" The rows below show its {kinds}, one row for each that runs at the same time."
    words += " A gap means that it does none of this."
    if numbered:
        words += " The number in a call is its number in the list."
    return f"{words} The picture shows one step, once, and is not a measurement."


def differences(own: RankTimelines, other: RankTimelines, mine: str = "yours", its: str = "the reference") -> str:
    """What differs in what the ranks did: calls that some never made, the number of calls, bytes and messages, whether
    calls overlap with computing, and their order. Seconds are not compared, since one step is no measurement."""
    sentences = [
        f"In {name_of(mine)} {ranks_named(meeting.missing)} never made the call {name_of(meeting.name)}, "
        f"in which {ranks_named(sorted(meeting.entered))} waited."
        for meeting in own.meetings
        if meeting.missing
    ][:1]
    compared: list[tuple[str, Callable[[RankTimelines], list[int]], Callable[[int], str]]] = [
        (
            "{who} makes {value}",
            lambda line: [len(_made(line, rank)) for rank in line.ranks],
            lambda count: number_of(count, "call"),
        ),
        (
            "{who} passes {value} to its calls",
            lambda line: [sum(_made(line, rank)) for rank in line.ranks],
            size,
        ),
        (
            "{who} sends {value}",
            lambda line: [len(_sent(line, rank)) for rank in line.ranks],
            lambda count: number_of(count, "message"),
        ),
        (
            "{who} sends {value} in messages",
            lambda line: [sum(_sent(line, rank)) for rank in line.ranks],
            size,
        ),
        (
            "{who} has up to {value} running at once",
            lambda line: [sum(any(bar.number for bar in row) for row in lane.rows) for lane in line.lanes],
            lambda count: number_of(count, "call"),
        ),
        (  # with how many is a matter of chance
            "{who} computes while {value} running",
            lambda line: [int(any(map(computed_beside, line.lanes)))] * len(line.lanes),
            lambda is_any: "calls are" if is_any else "no call is",
        ),
    ]
    clauses = []
    for template, values_of, words in compared:
        values, others = values_of(own), values_of(other)
        if words is size and not (any(values) and any(others)):
            continue  # if only one of them has any, the number is enough
        most, its_most = (max(each, default=0) for each in (values, others))
        who, its_who = (
            _who([words(value) for value in each], each, line) for each, line in ((values, own), (others, other))
        )
        if (who, words(most)) != (its_who, words(its_most)):
            of_whom = "" if who == its_who else f"{its_who} "
            clauses.append(
                f"{template.format(who=who, value=words(most))} (in {name_of(its)} {of_whom}{words(its_most)})"
            )
    if clauses:
        sentences.append(f"In {name_of(mine)} {'; '.join(clauses)}.")
    sentences += [
        f"In {name_of(whose)} not all ranks make their calls in the same order."
        for line, whose in ((own, mine), (other, its))
        if not _is_one_order(line)
    ]
    if not sentences:
        sentences.append(
            f"The ranks of {name_of(mine)} and of {name_of(its)} make the same number of calls with the same bytes. "
            "Calls overlap with computing in both, or in neither."
        )
    return " ".join(sentences)


def _who(said: Sequence[str], values: Sequence[int], line: RankTimelines) -> str:
    """The rank with the largest value, or "each rank" if all have the same text."""
    return "each rank" if len(set(said)) <= 1 else f"rank {line.ranks[values.index(max(values))]}"


def _made(line: RankTimelines, rank: int) -> list[int]:
    """The bytes of each call that a rank made."""
    return [meeting.bytes for meeting in line.meetings if rank in meeting.entered]


def _sent(line: RankTimelines, rank: int) -> list[int]:
    """The bytes of each message that a rank sent."""
    return [arrow.bytes for arrow in line.arrows if arrow.sender == rank]


def _is_one_order(line: RankTimelines) -> bool:
    """Whether the calls that two ranks have both made are in one order on both."""
    if any(meeting.missing for meeting in line.meetings):
        return True  # that is the graver fault, and is told by itself
    orders = {
        tuple(meeting.number for meeting in sorted(line.meetings, key=lambda meeting: meeting.entered[rank]))
        for rank in line.ranks
    }
    return len(orders) <= 1
