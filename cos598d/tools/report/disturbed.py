"""Runs whose machine was busy with other programs: their seconds are shown, but compared with nothing."""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

from cos598d.records.run import Summary
from cos598d.terminal.words import listed
from cos598d.tools.report.numbers import names_of, percent, plain
from cos598d.tools.report.references import is_disturbed, members

# In place of a ratio of seconds that means nothing: where a warning says why, which a page's cell links to.
DISTURBED = "disturbed (warning)"
# Less of a machine's processors than this share is the system's own work, such as that for the network.
LEAST_SHARE = 0.15
LEAST_SECONDS = 0.25  # of samples; the system counts its time in hundredths of a second
# Speed-ups beyond the number of ranks and processors by more than this factor are no result.
TOLERANCE = 1.1
MOST_NAMES = 8


def busy_and_own(rows: Iterable[Mapping[str, Any]]) -> tuple[float, float] | None:
    """From a rank's samples the share of its machine's processors that was busy, and how many its process used.

    None where the samples cover too little time.
    """
    first: Mapping[str, Any] | None = None
    last, busy = None, 0.0
    for row in rows:
        if "seconds" not in row:
            return None
        if last is not None:
            busy += row["host_cpu_percent"] / 100 * max(0.0, row["seconds"] - last["seconds"])
        first, last = first or row, row
    passed = last["seconds"] - first["seconds"] if first and last else 0.0
    if not (first and last) or passed < LEAST_SECONDS:
        return None
    return busy / passed, (last["process_cpu_seconds"] - first["process_cpu_seconds"]) / passed


def share_of_others(ranks: Sequence[tuple[float, float] | None], environment: Mapping[str, Any]) -> float | None:
    """The share of a machine's processors that programs other than the run's took from it, of the machine where it is
    largest; 0 where they took none that the ranks needed, None where the record does not tell.

    `ranks` has for each rank what `busy_and_own` returns.
    """
    cores, on_host = environment.get("cores"), environment.get("ranks_on_host")
    if not cores or not on_host:
        return None
    nodes = [place.get("node") for place in environment.get("places") or []]
    is_one = on_host >= len(ranks)  # emulated hosts are one machine, whatever they are called
    if not is_one and len(nodes) != len(ranks):
        return None
    # A rank with a GPU needs a processor to feed it.
    threads = (environment.get("threads_per_rank") or 1) if environment.get("device", "cpu") == "cpu" else 1
    machines: dict[Any, list[tuple[float, float] | None]] = {}
    for rank, found in enumerate(ranks):
        machines.setdefault(None if is_one else nodes[rank], []).append(found)
    shares = []
    for of_machine in machines.values():
        known = [found for found in of_machine if found is not None]
        if len(known) == len(of_machine):
            others = sum(busy for busy, _ in known) / len(known) - sum(own for _, own in known) / cores
            needed = min(1.0, len(known) * threads / cores)
            shares.append(others if others >= LEAST_SHARE and others + needed > 1 else 0.0)
    return max(shares, default=None)


def disturbance_remark(runs: Sequence[Summary], what: str = "run") -> str:
    """A sentence that names the runs that were disturbed, and what to do; "" where none was."""
    found = [member for run in runs for member in members(run) if member.get("taken_by_others")]
    if not found:
        return ""
    shares = sorted(member["taken_by_others"] for member in found)
    much = dict.fromkeys([percent(shares[0]), percent(shares[-1])])
    is_all = 1 < len(found) == sum(len(members(run)) for run in runs)
    names = f"all {what}s" if is_all else names_of([member["run"] for member in found], what, MOST_NAMES)
    return (
        f"the machine was busy: other programs took {' to '.join(much)} of its processors during {names}, so these "
        "times are disturbed, and not compared. Run again on an idle machine."
    )


def most_speed_up(run: Summary, environment: Mapping[str, Any]) -> float:
    """By how much a run can be faster than one rank at the most; infinite where its record does not tell."""
    ranks, cores = run["world_size"], environment.get("cores")
    if ranks == 1:
        return inf  # a process may have several GPUs
    is_one = environment.get("device", "cpu") == "cpu" and (environment.get("ranks_on_host") or 0) >= ranks
    return min(ranks, cores) if is_one and cores else ranks


def speed_up_words(ratio: float, run: Summary, base: Summary, environment: Mapping[str, Any]) -> str:
    """A speed-up for a cell; DISTURBED where one of the two was, or the ratio is more than there is to gain."""
    if is_disturbed(run) or is_disturbed(base) or ratio > TOLERANCE * most_speed_up(run, environment):
        return DISTURBED
    return f"{ratio:.2f}"


def impossible_remark(found: Sequence[tuple[str, str, float, float]]) -> str:
    """A sentence on speed-ups that are more than there is to gain; "" where there are none.

    `found`: of each pair the run's name, its base's, the speed-up and `most_speed_up`.
    """
    odd = [one for one in found if one[2] > TOLERANCE * one[3]]
    if not odd:
        return ""
    most = max(odd, key=lambda one: one[2] / one[3])
    bases = listed(list(dict.fromkeys(base for _, base, *_ in odd))[:MOST_NAMES])
    return (
        f"{most[0]} is {plain(most[2])} times as fast as {most[1]}, where at most {plain(most[3])} times is possible: "
        f"something disturbed {bases}. Run {bases} again while nothing else runs."
    )
