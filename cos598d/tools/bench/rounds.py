"""The measuring on a rank: every candidate once per round, on the same batch, from a common start."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch

from cos598d.comm.group import Ranks
from cos598d.records.figures import TOTALS
from cos598d.records.summary import LAST_TO_LAST, SLOWEST, world_seconds
from cos598d.tools.bench.candidates import Candidate
from cos598d.tools.bench.turns import PHASES, Turn
from cos598d.tools.bench.workload import Workload
from cos598d.world.devices import gpu_of

# Attached candidates may use this fraction of the free memory. Each keeps up to S bytes of buckets between its turns;
# one that makes steps also keeps weights and AdamW's state. The running one needs some S more.
MEMORY_FRACTION, WORKING_GRADIENTS, OWN_STATE = 0.6, 4, 3


def order_of_round(count: int, number: int, seed: int) -> list[int]:
    """The indices of the candidates in round `number`: shuffled, the same on every rank, so that no candidate always
    follows the same other one."""
    places = list(range(count))
    random.Random(f"{seed} {number}").shuffle(places)
    return places


def stays_attached(workload: Workload, count: int, steps: bool, ranks: Ranks, ranks_on_host: int) -> bool:
    """Whether all `count` candidates stay attached to their replicas from the first round to the last.

    Otherwise each is attached for its turn and warmed up again, which takes longer but uses only one candidate's
    memory. The free memory decides: of each host, and of each GPU, for the ranks that share it.
    """
    gpu = gpu_of(ranks.device)
    free = psutil.virtual_memory().available if gpu is None else torch.cuda.mem_get_info(ranks.device)[0]
    needed = workload.gradient_bytes * (count * (1 + OWN_STATE * steps) + WORKING_GRADIENTS)
    memories = ranks.exchange([gpu, ranks_on_host, free])
    on_gpu = Counter(gpu for gpu, _, _ in memories)
    return all(
        (sharing if gpu is None else on_gpu[gpu]) * needed < MEMORY_FRACTION * free for gpu, sharing, free in memories
    )


def measure_rounds(
    workload: Workload,
    candidates: Sequence[Candidate],
    ranks: Ranks,
    rounds: int,
    seed: int,
    stay: bool,
    steps: bool,
    progress: Callable[[], None],
) -> dict[str, Any]:
    """Measure every candidate once in each of `rounds` rounds; return the record's part, complete on every rank.

    seconds_of       how the samples' seconds are defined: LAST_TO_LAST if all ranks are on one host, else SLOWEST
    samples          one for each candidate and round: round, index in it, candidate, seconds (`world_seconds`), and by
                     rank the seconds of the iteration and of its phases, and on one host how long after the first of
                     them it started
    traffic          for each candidate the calls and bytes of its last iteration, by rank
    gradient_norm    for each candidate the norm of the averaged gradient of the first batch, by rank

    Communication before a turn (the weights from rank 0, the warm-up) and the start line are not included. `progress`
    is called after every turn.
    """
    attached = [Turn(candidate, workload, ranks, steps) if stay else None for candidate in candidates]
    rows: list[list[Any]] = []
    traffic, norms = {}, {}
    for number in range(rounds):
        inputs = workload.inputs(number, ranks.rank, ranks.world_size)
        for place, index in enumerate(order_of_round(len(candidates), number, seed)):
            label = candidates[index].label
            turn = attached[index] or Turn(candidates[index], workload, ranks, steps)
            rows.append([number, place, label, *turn.iterate(inputs)])
            traffic[label] = turn.totals
            norms[label] = turn.gradient_norm
            if not stay:
                turn.detach()
            del turn
            progress()
    for stayed in attached:
        if stayed:
            stayed.detach()
    everyone = ranks.exchange([[row[3:] for row in rows], traffic, norms])
    seconds, counts, found = zip(*everyone, strict=True)
    one_clock = len({str(host) for host in ranks.hosts}) == 1
    samples = []
    for position, (number, place, label, *_) in enumerate(rows):
        by_rank = [list(values) for values in zip(*(rank[position] for rank in seconds), strict=True)]
        mine, *phases, started, stopped = by_rank
        together = world_seconds(mine, started, stopped, one_clock)
        sample = {"round": number, "place": place, "candidate": label, "seconds": together, "seconds_by_rank": mine}
        if one_clock:
            sample["started_by_rank"] = [moment - min(started) for moment in started]
        sample |= {f"seconds_{phase}_by_rank": values for phase, values in zip(PHASES, phases, strict=True)}
        samples.append(sample)
    labels = [candidate.label for candidate in candidates]
    return {
        "seconds_of": LAST_TO_LAST if one_clock else SLOWEST,
        "samples": samples,
        "traffic": {
            label: {name: [rank[label][i] for rank in counts] for i, name in enumerate(TOTALS)} for label in labels
        },
        "gradient_norm": {label: [rank[label] for rank in found] for label in labels},
    }
