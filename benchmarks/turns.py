"""Every rank sends to all others over slow links: all at once, or in rounds with one sender and one receiver per link.

    cos598d cluster run --hosts 4 --rate 100mbit -- python benchmarks/turns.py

It sends what `sparse_zero1` sends for MiniLM on four ranks. There are 20 messages to each other rank instead of
reduce-scatters, four of them at a time, then 20 smaller ones instead of all-gathers, all at once. In the k-th round
rank r sends to r+k and receives from r-k. The message of a round waits until what the rank receives that many rounds
earlier has arrived.
"""

import argparse
import math
import os
import time
from collections import deque
from statistics import median

import torch
import torch.distributed as dist

MESSAGES = 20
WAYS = {"all at once": math.inf, "one round": 1, "two rounds": 2, "three rounds": 3}


def exchange(size: int, messages_under_way: int, rounds_under_way: float) -> float:
    """Send MESSAGES of `size` bytes to every other rank, and receive as many. Return the seconds that it took."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own, landing = torch.zeros(size, dtype=torch.uint8), torch.empty(ranks, size, dtype=torch.uint8)
    coming: deque[dist.Work] = deque()
    waiting: deque[tuple[int, int]] = deque()
    going: list[dist.Work] = []
    come, sent = 0, 0
    started = time.perf_counter()
    for number in range(MESSAGES + messages_under_way):
        if number < MESSAGES:
            for k in range(1, ranks):
                coming.append(dist.irecv(landing[k], (rank - k) % ranks, tag=number))
                waiting.append(((rank + k) % ranks, number))
        due = max(0, number + 1 - messages_under_way) * (ranks - 1)
        while True:
            while waiting and sent < come + rounds_under_way:
                other, tag = waiting.popleft()
                going.append(dist.isend(own, other, tag=tag))
                sent += 1
            if come >= min(due, MESSAGES * (ranks - 1)):
                break
            coming.popleft().wait()
            come += 1
    for work in going:
        work.wait()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="of each way, in turn")
    parser.add_argument(
        "--reduced", type=int, default=540_000, help="bytes of a message in place of a reduce-scatter's"
    )
    parser.add_argument("--gathered", type=int, default=364_000, help="bytes of a message in place of an all-gather's")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    seconds: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    exchange(options.gathered, 4, math.inf)
    for repeat in range(options.repeats):
        for way in list(WAYS)[:: 1 if repeat % 2 == 0 else -1]:
            took = []
            for size, under_way in ((options.reduced, 4), (options.gathered, MESSAGES)):
                dist.barrier()
                took.append(exchange(size, under_way, WAYS[way]))
            slowest = torch.tensor(took)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            seconds[way].append(slowest.tolist())
    if int(os.environ["RANK"]) == 0:
        for way, took in seconds.items():
            reduced, gathered = (median(each) for each in zip(*took, strict=True))
            print(f"{way:14s} {reduced:.2f} s in place of reduce-scatters, {gathered:.2f} s of all-gathers")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
