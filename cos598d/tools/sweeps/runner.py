"""Makes the runs that are missing, some at a time. A run's own folder tells whether it is finished, and is that run.

Signals are passed on to the runs that are under way, and they end with this program.
"""

import json
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from cos598d.config import RunConfig, config_from
from cos598d.errors import ERROR, UserError
from cos598d.records.conventions import AUTO_PRECISION, CHECKPOINTS
from cos598d.records.unfinished import is_at_work
from cos598d.terminal.children import end_all, exit_code_of
from cos598d.terminal.fields import flags_of
from cos598d.terminal.printable import printable
from cos598d.terminal.program import start
from cos598d.terminal.signals import GOES_ON, AskedToEnd
from cos598d.tools.sweeps.plan import SET_HERE, Planned

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
LOOK_SECONDS = 0.05
# How long a run of a killed call may take to save its state, before a run of this call takes its folder.
ENDING_SECONDS = 20.0
# The prefix of a rank's lines on an emulated host.
_HOST = re.compile(r"^host\d+(?: rank\d+)?\| ")
_RANK = re.compile(r"^rank \d+")


def last_words(output: Iterable[str]) -> str:
    """The line of a program's output that best explains its end: the last one, or a rank's own if there is one."""
    lines = [_HOST.sub("", printable(line.rstrip())).strip().removeprefix(ERROR) for line in output]
    own = [line for line in lines if _RANK.match(line)]
    return next(iter([*reversed(own), *filter(None, reversed(lines))]), "")


def is_finished(one: Planned, folder: Path) -> bool:
    """Whether the run is there. Raises UserError if the folder has a run with other flags, which it names."""
    place = folder / one.name
    if (place / "config.json").exists():
        try:
            config = json.loads((place / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{place / 'config.json'} cannot be read ({error}). Remove {place}.") from None
        asked = {**asdict(config_from(one.flags)), "world_size": one.world_size}
        for name, value in json.loads(json.dumps({n: asked[n] for n in (*flags_of(RunConfig), "world_size")})).items():
            is_chosen = value is None or (name in ("sync", "precision") and value in ("auto", AUTO_PRECISION))
            if name not in SET_HERE and not is_chosen and config.get(name) != value:
                raise UserError(
                    f"{place} is another run: its {name} is {config.get(name)}, and should be {value}. Give the same "
                    "flags again, or another --runs_dir."
                )
    return (place / "summary.json").exists()


@dataclass
class _UnderWay:
    """A run whose program is running."""

    run: Planned
    child: subprocess.Popen
    log: Path
    heard: int  # bytes of the log before this start
    began: float


class Runner:
    """Makes runs in a folder, `parallel` at a time, in their order.

    `command_of` gives a run's program. After a signal no more are started, and those under way get it too.
    """

    def __init__(self, folder: Path, parallel: int, command_of: Callable[[Planned], Sequence[str]]):
        self._folder, self._parallel, self._command_of = folder, parallel, command_of
        self._asked: list[int] = []
        self._under_way: list[_UnderWay] = []

    def make(self, runs: Sequence[Planned]) -> dict[str, int]:
        """Make what is missing. Return the exit code of each run by its name: 0 if it is finished.

        Raises KeyboardInterrupt or AskedToEnd if a signal has asked for it, after all runs under way have ended.
        """
        codes = {one.name: 0 for one in runs if not one.refused and is_finished(one, self._folder)}
        for name in codes:
            print(f"{name}: finished before", flush=True)
        waiting = [one for one in runs if not one.refused and one.name not in codes]
        total = len(waiting)
        before = {number: signal.getsignal(number) for number in PASSED_ON}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # else who started us wants us to go on: nohup, or `&`
                signal.signal(number, self._pass_on)
        try:
            while self._under_way or (waiting and not self._asked):
                while waiting and len(self._under_way) < self._parallel and not self._asked:
                    self._begin(waiting.pop(0))
                for one in [one for one in self._under_way if one.child.poll() is not None]:
                    self._under_way.remove(one)
                    codes[one.run.name] = self._end(one, f"[{total - len(waiting) - len(self._under_way)}/{total}]")
                time.sleep(LOOK_SECONDS)
        finally:
            end_all([one.child for one in self._under_way], ENDING_SECONDS)
            for number, handler in before.items():
                signal.signal(number, handler)
        if signal.SIGINT in self._asked:
            raise KeyboardInterrupt
        if any(number != signal.SIGUSR1 for number in self._asked):
            raise AskedToEnd(self._asked[0])
        return codes | {one.name: GOES_ON for one in waiting}

    def _begin(self, one: Planned) -> None:
        place, log = self._folder / one.name, self._folder / "logs" / f"{one.name.replace('/', '-')}.txt"
        deadline = time.monotonic() + ENDING_SECONDS
        while is_at_work(place) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        log.parent.mkdir(parents=True, exist_ok=True)
        command = self._command_of(one)
        with log.open("a", encoding="utf-8") as output:
            output.write(f"$ {shlex.join(command)}\n")
            output.flush()
            heard = output.tell()
            child = start(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        self._under_way.append(_UnderWay(one, child, log, heard, time.monotonic()))
        for number in self._asked:  # those that arrived meanwhile
            child.send_signal(number)

    def _end(self, one: _UnderWay, head: str) -> int:
        """Print how the run has ended, and return its exit code."""
        code = exit_code_of(one.child.returncode)
        if code == 0:
            words = f"{time.monotonic() - one.began:.0f} s"
            if not one.run.keeps:
                shutil.rmtree(self._folder / one.run.name / CHECKPOINTS, ignore_errors=True)
        elif code == GOES_ON or self._asked:
            words = "it stopped before its end. Give the same command again, and it resumes."
        else:
            with one.log.open(encoding="utf-8", errors="replace") as lines:
                lines.seek(one.heard)
                words = f"it failed with exit code {code}: {last_words(lines) or 'it said nothing'} (see {one.log})"
        print(printable(f"{head} {one.run.name}: {words}"), flush=True)
        return code

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self._asked.append(number)
        for one in self._under_way:
            one.child.send_signal(number)
