"""A run as a program of its own, started from here: what it says is passed on, and it ends when we do."""

import contextlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

from cos598d.errors import UserError
from cos598d.program import own_environment
from cos598d.terminal.printable import printable

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Where there is such a program, the kernel ends the child when this process is killed.
END_WITH_PARENT = ("setpriv", "--pdeathsig", "TERM")


class Stopped(UserError):
    """A signal has asked this program to end."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}.")
        self.exit_code = 128 + number


def train(words: Sequence[str]) -> tuple[int, str]:
    """Run `python -m cos598d train` with these words; return its exit code, and why it failed as it said itself.

    SIGINT, SIGTERM and SIGHUP are passed on to it; when it has ended by them, KeyboardInterrupt or Stopped is raised.
    """
    before = END_WITH_PARENT if shutil.which(END_WITH_PARENT[0]) else ()
    command = [*before, sys.executable, "-m", "cos598d", "train", *words]
    last = ""
    with _asked_to_end() as asked:
        # In a session of its own, so that a Ctrl-C reaches it once.
        child = subprocess.Popen(
            command, env=own_environment(), stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
        )
        assert child.stderr is not None  # a pipe, as asked for above
        try:
            asked.pass_to(child)
            with child.stderr as lines:
                for line in lines:
                    line = printable(line.rstrip())
                    print(line, file=sys.stderr, flush=True)
                    # What a rank says of its end is better than what a library says after it.
                    if line.strip() and (line.startswith("rank ") or not last.startswith("rank ")):
                        last = line.strip()
        except BaseException:  # nobody reads what we print
            child.terminate()
            raise
        finally:
            code = child.wait()
    return (code if code >= 0 else 128 - code), last


class _Asked:
    """The signals that came, which go to the child as soon as there is one."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._child: subprocess.Popen | None = None

    def pass_to(self, child: subprocess.Popen) -> None:
        self._child = child
        for number in self.numbers:  # that came before
            child.send_signal(number)

    def __call__(self, number: int, _: FrameType | None) -> None:
        self.numbers.append(number)
        if self._child:
            self._child.send_signal(number)


@contextlib.contextmanager
def _asked_to_end() -> Iterator[_Asked]:
    """Within it signals are noted and passed on; after it they are raised, and this program's own again."""
    asked = _Asked()
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
        raise Stopped(asked.numbers[0])
