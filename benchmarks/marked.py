"""`cos598d` with notes of each rank: when it did what, and what it held and sent meanwhile.

    MARKS=FOLDER python benchmarks/marked.py train --world_size 4 ...

The functions at the ends of a rank's phases are wrapped in a clock before ranks are forked; nothing else changes. Each
rank writes FOLDER/rankR.json. `phases` has each one's beginning and end by the host's clock and the rank's CPU seconds
between them (of all its threads; a phase may occur several times). `held` is what it had after its last step. The
process that started them writes starter.json.
"""

import functools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cos598d.commands.start import start

FOLDER = Path(os.environ["MARKS"])


class Marks:
    """The notes of one process about itself."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, float, float, float]] = []  # name, beginning, end, CPU seconds
        self.held: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context for a phase with this name."""
        began, used = time.monotonic(), time.process_time()
        try:
            yield
        finally:
            self.phases.append((name, began, time.monotonic(), time.process_time() - used))

    def write(self, name: str) -> None:
        """Write everything to a file."""
        from cos598d.terminal.files import write_json

        write_json(FOLDER / f"{name}.json", vars(self))


marks = Marks()


def held() -> dict[str, int]:
    """This process's current resources: bytes of memory (its share of shared pages), threads, descriptors."""
    rows = dict(line.split()[:2] for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    found = Counter(descriptors=0, sockets=0, threads=len(os.listdir("/proc/self/task")))
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own
            continue
        found["descriptors"] += 1
        found["sockets"] += target.startswith("socket:")
    own = int(rows["Private_Clean:"]) + int(rows["Private_Dirty:"])
    kilobytes = {"pss_bytes": int(rows["Pss:"]), "rss_bytes": int(rows["Rss:"]), "own_bytes": own}
    return {**found, **{name: 1024 * number for name, number in kilobytes.items()}}


def timed(owner: Any, name: str, phase: str, first: str | None = None) -> None:
    """From now on each call of `owner.name` is a phase; the first call may have another name."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def within(*words: Any, **more: Any) -> Any:
        is_first = first is not None and all(each[0] != first for each in marks.phases)
        with marks.phase(first if first is not None and is_first else phase):
            return function(*words, **more)

    setattr(owner, name, within)


def before(owner: Any, name: str, act: Callable[..., None]) -> None:
    """From now on `act` is called with a call's arguments before each call of `owner.name`."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def preceded(*words: Any, **more: Any) -> Any:
        act(*words, **more)
        return function(*words, **more)

    setattr(owner, name, preceded)


def load() -> Callable[..., int]:
    """Import everything that a run needs, wrap its phases, and return the program."""
    began = time.process_time()
    from multiprocessing.process import BaseProcess

    from cos598d import loop, rank, run
    from cos598d.comm import process_group
    from cos598d.commands import cli
    from cos598d.commands import train as command
    from cos598d.strategies.observed import TimedStrategy
    from cos598d.world import launch
    from cos598d.world.lifeline import Lifeline

    marks.phases.append(("imports", BEGAN, time.monotonic(), time.process_time() - began))
    timed(command, "find", "finding")
    timed(BaseProcess, "start", "forking")
    timed(rank, "meet", "meeting")
    timed(Lifeline, "__init__", "lifeline")
    timed(process_group, "open_group", "group")
    timed(TimedStrategy, "attach", "attaching")
    timed(loop, "step", "step", first="first step")
    timed(run, "publish_record", "record")
    timed(Lifeline, "close", "leaving")
    timed(process_group, "close_group", "leaving the group")
    before(run, "publish_record", lambda *_, **__: marks.held.update(held()))
    before(launch, "_failure", lambda *_, **__: marks.write("starter"))
    run_rank = command.run_rank

    def be_marked_rank(config: Any, identity: Any, found: Any = None) -> int:
        marks.__init__()  # a fork begins with its parent's notes
        with marks.phase("life"):
            exit_code = run_rank(config, identity, found)
        marks.write(f"rank{identity.rank}")
        return exit_code

    command.run_rank = be_marked_rank
    return cli.main


if __name__ == "__main__":
    start(load)
