"""Runs as programs of their own, started from here: they are told of signals, and they end when we do."""

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

from cos598d.errors import ERROR, UserError
from cos598d.terminal.printable import printable
from cos598d.terminal.program import start

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What stands before the words of a rank on an emulated host.
_HOST = re.compile(r"^host\d+(?: rank\d+)?\| ")
_RANK = re.compile(r"^rank \d+")


class SweepStopped(UserError):
    """A signal has asked this program to end."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}.")
        self.exit_code = 128 + number


def train(words: Sequence[str]) -> tuple[int, str]:
    """Run `cos598d train` with these words; return its exit code, and why it failed as it said itself.

    SIGINT, SIGTERM and SIGHUP are passed on to it; when it has ended by them, KeyboardInterrupt or Stopped is raised.
    """
    last = LastWords()
    with signals_passed_on() as asked:
        child = start([sys.executable, "-m", "cos598d", "train", *words], stderr=subprocess.PIPE)
        assert child.stderr is not None  # a pipe, as asked for above
        try:
            asked.pass_to(child)
            with child.stderr as lines:
                for line in lines:
                    last.hear(line)
                    print(printable(line.rstrip()), file=sys.stderr, flush=True)
        except BaseException:  # nobody reads what we print
            child.terminate()
            raise
        finally:
            child.wait()
    return exit_code(child), last.words


def exit_code(child: subprocess.Popen) -> int:
    """The exit code of a program that has ended, as a shell says it: 128 + N where signal N ended it."""
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


class LastWords:
    """Of the lines that a program prints, the one that says best why it ended: the last, and of a rank if one spoke."""

    def __init__(self) -> None:
        self.words = ""

    def hear(self, line: str) -> None:
        """A further line."""
        line = _HOST.sub("", printable(line.rstrip())).strip().removeprefix(ERROR)
        # What a rank says of its end is better than what a library says after it.
        if line and (_RANK.match(line) or not _RANK.match(self.words)):
            self.words = line


class PassedSignals:
    """The signals that came, which go to all children that are told of here, as soon as there are some."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._children: list[subprocess.Popen] = []

    def pass_to(self, child: subprocess.Popen) -> None:
        """Let `child` have each signal, also those that came before."""
        self._children.append(child)
        for number in self.numbers:
            child.send_signal(number)

    def __call__(self, number: int, _: FrameType | None) -> None:
        self.numbers.append(number)
        for child in self._children:
            child.send_signal(number)


@contextlib.contextmanager
def signals_passed_on() -> Iterator[PassedSignals]:
    """Within it signals are noted and passed on; after it they are raised, and this program's own again."""
    asked = PassedSignals()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # else our starter wants us to go on: nohup, or `&`
            signal.signal(number, asked)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if signal.SIGINT in asked.numbers:
        raise KeyboardInterrupt
    if asked.numbers:
        raise SweepStopped(asked.numbers[0])
