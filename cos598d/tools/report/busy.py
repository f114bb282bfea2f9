"""Was the machine busy with something else? Then seconds are shown, but compared with nothing."""

from collections.abc import Iterable, Sequence
from math import inf

from cos598d.records.schema import Environment, Sample

# In place of a ratio of seconds that means nothing; a warning says why.
DISTURBED = "disturbed (warning)"
# Less of a machine's processors than this share is the system's own work, such as that for the network.
LEAST_SHARE = 0.15
LEAST_SECONDS = 0.25  # of samples; the system counts its time in hundredths of a second
# Speed-ups beyond the number of ranks and processors by more than this factor are no result.
TOLERANCE = 1.1


def busy_and_own(samples: Iterable[Sample]) -> tuple[float, float] | None:
    """From a rank's samples the share of its machine's processors that was busy, and how many its process used.

    None where the samples cover too little time.
    """
    first: Sample | None = None
    last, busy = None, 0.0
    for sample in samples:
        if last is not None:
            busy += sample.host_cpu_percent / 100 * max(0.0, sample.seconds - last.seconds)
        first, last = first or sample, sample
    passed = last.seconds - first.seconds if first and last else 0.0
    if not (first and last) or passed < LEAST_SECONDS:
        return None
    return busy / passed, (last.process_cpu_seconds - first.process_cpu_seconds) / passed


def share_of_others(loads: Sequence[tuple[float, float] | None], environment: Environment) -> float | None:
    """The share of a machine's processors that programs other than the run's took from it, of the machine where it is
    largest; 0 where they took none that the ranks needed, None where the record does not tell.

    `loads` has for each rank what `busy_and_own` returns.
    """
    cores, is_one = environment.cores, environment.ranks_on_host >= len(loads)
    # Emulated hosts are one machine, whatever they are called.
    nodes = [""] * len(loads) if is_one else [place.node for place in environment.places]
    if not cores or len(nodes) != len(loads):
        return None
    # A rank with a GPU needs a processor to feed it.
    threads = (environment.threads_per_rank or 1) if environment.device == "cpu" else 1
    machines: dict[str, list[tuple[float, float] | None]] = {}
    for node, load in zip(nodes, loads, strict=True):
        machines.setdefault(node, []).append(load)
    shares = []
    for of_machine in machines.values():
        known = [load for load in of_machine if load is not None]
        if len(known) == len(of_machine):
            others = sum(busy for busy, _ in known) / len(known) - sum(own for _, own in known) / cores
            needed = min(1.0, len(known) * threads / cores)
            shares.append(others if others >= LEAST_SHARE and others + needed > 1 else 0.0)
    return max(shares, default=None)


def most_speed_up(ranks: int, environment: Environment) -> float:
    """By how much a run can be faster than one rank at the most."""
    if ranks == 1:
        return inf  # a process may have several GPUs
    is_one = environment.device == "cpu" and environment.ranks_on_host >= ranks
    return min(ranks, environment.cores) if is_one and environment.cores else ranks
