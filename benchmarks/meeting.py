"""How long many ranks take to meet, to exchange one value, and to give one to rank 0: light processes on this host.

    python benchmarks/meeting.py [--world_sizes 64,256,1024] [--processes 8]

A rank is a connection of its own, as in a run, that proves itself, arrives and waits; what a rank does besides (torch,
data, gloo's connections) is left out. The ranks are spread over a few processes, a thread each; rank 0 has one alone.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cos598d.world.endpoint import listen
from cos598d.world.identity import Identity
from cos598d.world.rendezvous import meet
from cos598d.world.secret import new_secret

ROUNDS = 5
SECONDS = 300.0
VALUE = {"digest": "0" * 64, "examples": 2490}  # what ranks tell each other of their data


def main() -> None:
    """Measure, and print a line for each world size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world_sizes", default="64,256,1024")
    parser.add_argument("--processes", type=int, default=8, help="processes that the ranks but 0 are spread over")
    options = parser.parse_args()
    print(f"{'ranks':>6} {'meeting s':>10} {'exchange s':>11} {'to rank 0 s':>12}   (medians of {ROUNDS} exchanges)")
    for size in map(int, options.world_sizes.split(",")):
        found = measure(size, options.processes)
        print(f"{size:6d} {found['meeting']:10.3f} {found['exchange']:11.4f} {found['collect']:12.4f}", flush=True)


def measure(size: int, processes: int) -> dict[str, float]:
    """Seconds by what is done, from the first rank's start of it to the last one's end."""
    with listen("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    secret = new_secret().encode()
    shares = [[0], *([rank for rank in range(1, size) if rank % processes == k] for k in range(processes))]
    context = multiprocessing.get_context("fork")
    ready, begin = context.Semaphore(0), context.Event()
    answers = context.SimpleQueue()
    workers = [
        context.Process(target=_be_ranks, args=(ranks, size, port, secret, ready, begin, answers))
        for ranks in shares
        if ranks
    ]
    for worker in workers:
        worker.start()
    for _ in workers:
        ready.acquire()
    begin.set()
    spans = [json.loads(answers.get()) for _ in workers]
    for worker in workers:
        worker.join()
    return {what: _seconds([span[what] for span in spans]) for what in spans[0]}


def _seconds(by_process: list[list[list[float]]]) -> float:
    """The median over the rounds; each lasts from the first rank's start to the last one's end."""
    spans = sorted(tuple(span) for of_process in by_process for span in of_process)
    rounds = len(by_process[0])  # rank 0's process has one rank
    count = len(spans) // rounds
    of_rounds = [spans[k * count : (k + 1) * count] for k in range(rounds)]
    return statistics.median(max(stop for _, stop in one) - min(start for start, _ in one) for one in of_rounds)


def _be_ranks(ranks, size, port, secret, ready, begin, answers) -> None:
    spans: dict[str, list[tuple[float, float]]] = {"meeting": [], "exchange": [], "collect": []}

    def be_rank(rank: int) -> None:
        begin.wait()
        started = time.monotonic()
        meeting = meet(Identity(rank, size, "127.0.0.1", port, secret=secret), SECONDS, {})
        spans["meeting"].append((started, time.monotonic()))
        for function in (meeting.exchange, meeting.collect):
            for _ in range(ROUNDS):
                meeting.exchange(None)  # all begin together
                started = time.monotonic()
                function(VALUE)
                spans[function.__name__].append((started, time.monotonic()))
        meeting.collect(None)  # rank 0 serves the others: it is the last to go

    threads = [threading.Thread(target=be_rank, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    ready.release()
    for thread in threads:
        thread.join()
    answers.put(json.dumps(spans))


if __name__ == "__main__":
    main()
