"""The cost for many ranks to meet, to watch each other, to exchange a value and to leave, with lightweight ranks.

    python benchmarks/meeting.py [--world_sizes 64,256,1024] [--processes 8] [--runs_dir FOLDER]

A rank consists of its connections, as in a run: it proves itself, arrives and waits for the verdict (`meet`), and joins
the watchdogs' tree (`Watchdog`). Then all give a value to all, once different ones and once the same, and one to rank 0
only. They ask for each other's addresses as gloo does, and leave in order. Everything else of a rank (torch, data,
gloo's own connections) is left out. The ranks are spread over a few processes, one thread each. Rank 0 has its own
process, whose memory, descriptors and messages are counted.

Finally the same number of ranks come again, except one that never does and one that has another secret. The errors that
the others get are printed, with the number of ranks that get each. With --runs_dir the numbers are written to
meeting.json in that folder and drawn to meeting.svg.
"""

import argparse
import json
import multiprocessing
import os
import re
import resource
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from growth import draw, in_words

from cos598d.errors import UserError
from cos598d.terminal.files import write_json
from cos598d.terminal.tables import as_text
from cos598d.world.connection import Connection
from cos598d.world.endpoint import listen
from cos598d.world.identity import Identity
from cos598d.world.meeting import Meeting
from cos598d.world.rendezvous import meet
from cos598d.world.secret import new_secret
from cos598d.world.watchdog import Watchdog

ROUNDS = 5
SECONDS = 300.0
PATIENCE = 15.0  # seconds that arrived ranks wait for missing ones
VALUE = {"digest": "0" * 64, "examples": 2490}  # what ranks exchange about their data
ADDRESS, AT_ONCE = bytes(170), 128  # the size of gloo's address of a rank, and how many it requests at once
PHASES = ("meeting", "lifeline", "own", "same", "collect", "addresses", "leaving")


def main() -> None:
    """Measure, and print a line for each world size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world_sizes", default="64,256,1024")
    parser.add_argument("--processes", type=int, default=8, help="processes that the ranks but 0 are spread over")
    parser.add_argument("--runs_dir", type=Path, help="where the numbers and the drawing are kept")
    options = parser.parse_args()
    sizes = [int(word) for word in options.world_sizes.split(",")]
    found = {size: measure(size, options.processes) for size in sizes}
    columns = {phase: (lambda one, phase=phase: one["seconds"][phase]) for phase in PHASES}
    columns |= {
        "rank 0's peak MB": lambda one: one["rank_0"]["peak_bytes"] / 1e6,
        "descriptors": lambda one: one["rank_0"]["descriptors"],
        "messages": lambda one: one["rank_0"]["sent"],
        "MB sent": lambda one: one["rank_0"]["sent_bytes"] / 1e6,
        "processor s": lambda one: one["rank_0"]["processor_seconds"],
    }
    rows = [["ranks", *columns]]
    rows += [[str(size), *(f"{value(one):.3f}" for value in columns.values())] for size, one in found.items()]
    rows.append(["grows as", *(in_words({n: value(one) for n, one in found.items()}) for value in columns.values())])
    print(as_text(rows, numbers=True))
    print(f"seconds of all ranks; own, same, collect: medians of {ROUNDS}; the last five columns: rank 0's in all\n")
    heard = hear(sizes[-1], options.processes)
    for sentence, ranks in heard.most_common():
        print(f"{ranks:6d} of {sizes[-1]}: {sentence}")
    if options.runs_dir:
        write_json(options.runs_dir / "meeting.json", {"found": list(found.values()), "heard": heard})
        seconds = {phase: {n: one["seconds"][phase] for n, one in found.items()} for phase in PHASES}
        own = list(columns)[len(PHASES) :]
        of_rank_0 = {name: {n: columns[name](one) for n, one in found.items()} for name in own}
        panels = {"seconds of all ranks": seconds, "of rank 0": of_rank_0}
        draw(options.runs_dir / "meeting.svg", panels, "light ranks on one host")


def measure(size: int, processes: int) -> dict[str, Any]:
    """Seconds by phase, from the first rank's start of it to the last one's end, and what rank 0 had and sent."""
    answers = _spread(size, processes, _be_ranks)
    spans = [answer["spans"] for answer in answers]
    (rank_0,) = (answer["rank_0"] for answer in answers if answer["rank_0"])
    seconds = {phase: _seconds([one[phase] for one in spans]) for phase in PHASES}
    return {"ranks": size, "seconds": seconds, "rank_0": rank_0}


def hear(size: int, processes: int) -> Counter[str]:
    """The errors of ranks if the last never comes and the one before has another secret, each with its count."""
    answers = _spread(size, processes, _hear)
    return Counter(re.sub(r"127\.0\.0\.1:\d+", "rank 0's port", said) for answer in answers for said in answer)


def _spread(size: int, processes: int, function: Callable) -> list[Any]:
    """Call `function(identities)` in each process, all at once, and return the answers."""
    with listen("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    secret = new_secret().encode()
    ranks = [Identity(rank, size, "127.0.0.1", port, secret=secret) for rank in range(size)]
    shares = [ranks[:1], *(ranks[1 + first :: processes] for first in range(processes))]
    context = multiprocessing.get_context("fork")
    ready, begin, queue = context.Semaphore(0), context.Event(), context.SimpleQueue()
    workers = [context.Process(target=_work, args=(function, share, ready, begin, queue)) for share in shares if share]
    for worker in workers:
        worker.start()
    for _ in workers:
        ready.acquire()
    begin.set()
    answers = [json.loads(queue.get()) for _ in workers]
    for worker in workers:
        worker.join()
    return answers


def _work(function, share, ready, begin, queue) -> None:
    ready.release()
    begin.wait()
    queue.put(json.dumps(function(share)))


def _at_once(function: Callable, share: list[Identity]) -> None:
    threads = [threading.Thread(target=function, args=(identity,)) for identity in share]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _be_ranks(share: list[Identity]) -> dict[str, Any]:
    spans: dict[str, list[tuple[float, float]]] = {phase: [] for phase in PHASES}
    has_rank_0 = share[0].rank == 0
    sent, rank_0, began_with = Counter[str](), {}, _peak_bytes()
    if has_rank_0:
        pack = Connection.pack

        def counted(self: Connection, words: Any, data: bytes = b"") -> bytes:
            frame = pack(self, words, data)
            sent.update(sent=1, sent_bytes=len(frame))
            return frame

        Connection.pack = counted

    def timed(phase: str, act: Callable[[], Any]) -> Any:
        started = time.monotonic()
        found = act()
        spans[phase].append((started, time.monotonic()))
        return found

    def be_rank(identity: Identity) -> None:
        meeting = timed("meeting", lambda: meet(identity, SECONDS, {}))
        watchdog = timed("lifeline", lambda: Watchdog(meeting))
        own, size = VALUE | {"rank": identity.rank}, identity.world_size
        acts = {"own": lambda: meeting.exchange(own), "same": lambda: meeting.exchange(VALUE)}
        acts["collect"] = lambda: meeting.collect(VALUE)
        for phase, act in acts.items():
            for _ in range(ROUNDS):
                meeting.exchange(None)  # all begin together
                timed(phase, act)
        meeting.exchange(None)
        timed("addresses", lambda: _ask_for_addresses(meeting, identity.rank, size))
        meeting.exchange(None)
        if identity.rank == 0:
            rank_0["descriptors"] = len(os.listdir("/proc/self/fd"))
        timed("leaving", watchdog.close)
        # Rank 0 serves the others, and `close` has waited for them.

    _at_once(be_rank, share)
    if has_rank_0:
        rank_0 |= {**sent, "peak_bytes": _peak_bytes() - began_with, "processor_seconds": time.process_time()}
    return {"spans": spans, "rank_0": rank_0}


def _ask_for_addresses(meeting: Meeting, rank: int, size: int) -> None:
    meeting.store.set(f"group/{rank}", ADDRESS)
    for first in range(0, size, AT_ONCE):
        meeting.store.multi_get([f"group/{other}" for other in range(first, min(first + AT_ONCE, size))])


def _hear(share: list[Identity]) -> list[str]:
    said: list[str] = []

    def be_rank(identity: Identity) -> None:
        size = identity.world_size
        if identity.rank == size - 1:
            return
        is_wrong = identity.rank == size - 2
        secret = new_secret().encode() if is_wrong else identity.secret
        try:
            meet(Identity(identity.rank, size, "127.0.0.1", identity.master_port, secret=secret), PATIENCE, {})
        except UserError as error:
            said.append(str(error))

    _at_once(be_rank, share)
    return said


def _peak_bytes() -> int:
    """The peak of this process's memory; a fork begins with its parent's."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _seconds(by_process: list[list[list[float]]]) -> float:
    """The median over the rounds; each lasts from the first rank's start to the last one's end."""
    spans = sorted(tuple(span) for of_process in by_process for span in of_process)
    rounds = min(len(of_process) for of_process in by_process if of_process)  # rank 0's process has one rank
    count = len(spans) // rounds
    of_rounds = [spans[k * count : (k + 1) * count] for k in range(rounds)]
    return statistics.median(max(stop for _, stop in one) - min(start for start, _ in one) for one in of_rounds)


if __name__ == "__main__":
    main()
