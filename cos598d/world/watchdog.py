"""The line between the ranks that tells every one of them, at once and in words, when one is gone.

A collective whose peer died may hang until its timeout, and its error does not say who died. So each rank keeps
idle TCP connections to its neighbours in a tree, which is a star around rank 0 in all but large worlds (`lines`). The
kernel closes them when the process ends, however it ends, and TCP's keepalive closes them when a host falls silent: a
neighbour reads the end of the stream, knows the rank, and tells the others, who pass it on.
A rank that fails with a sentence sends that sentence first, so that all can repeat it. What a rank was told it passes
on before it leaves, so its own end is never news.

The thread that watches the lines leaves by `os._exit` where it must: the main thread may be inside a collective,
which nothing else can interrupt.
"""

import contextlib
import errno
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time

from cos598d.errors import UserError
from cos598d.files import remove_unfinished
from cos598d.terminal.printable import printable
from cos598d.world.launch import check_launcher
from cos598d.world.lines import Missing, Peer, open_lines, parent_of
from cos598d.world.meeting import Meeting
from cos598d.world.network import has_link, interface_with_link
from cos598d.world.reception import SILENCE

# The others say of this rank that they lost it, so it says so too, with what it alone can see.
CUT_OFF = "lost rank {rank}, this one: its network interface {interface} has no link."
# What a line ends with when its peer's host is silent, not the peer gone.
UNHEARD = frozenset((errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN))
PROBES = 3  # of TCP's keepalive, unanswered, before a host counts as silent
SEND_SECONDS = 5.0  # a neighbour that takes no message for so long hears nothing more
# How long a rank that was told to stop may take to leave by itself.
GRACE_SECONDS = 2.0


class Lifeline:
    """This rank's ends of the lines. Made once by every rank of a `Meeting` with more than one rank.

    Between `__init__` and `close` this process ends itself, with exit code 1 and a sentence, when another rank is lost.
    """

    def __init__(self, meeting: Meeting):
        self.rank = meeting.identity.rank
        self._seconds = meeting.seconds
        self._parent = parent_of(self.rank)
        self._lines: dict[socket.socket, Peer] = {}
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._leaving = threading.Event()
        self._finished: set[int] = set()
        self._answered: set[int] = set()
        self._all_below_finished, self._all_finished = threading.Event(), threading.Event()
        self._connect(meeting)
        self._interface = interface_with_link(next(iter(self._lines)).getsockname()[0])
        self._signals, written = socket.socketpair()
        written.setblocking(False)
        self._written = written
        self._previous_fd = None
        if threading.current_thread() is threading.main_thread():
            # Python's own handlers wait for the main thread; this wakes ours although a collective blocks that one.
            self._previous_fd = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="lifeline", daemon=True)
        self._thread.start()

    def _connect(self, meeting: Meeting) -> None:
        try:
            self._lines = open_lines(meeting)
        except Missing as missing:
            self._lines = dict(missing.lines)
            sentence = SILENCE.format(rank=", ".join(map(str, missing.ranks)))
            self._tell({"lost": missing.ranks[0], "sentence": sentence})
            raise UserError(sentence) from None
        if all(peer.rank == self._parent for peer in self._lines.values()):
            self._all_below_finished.set()
        silence = meeting.identity.silence_seconds
        interval = silence // (PROBES + 1)
        keepalive = {
            "TCP_KEEPIDLE": silence - PROBES * interval,
            "TCP_KEEPINTVL": interval,
            "TCP_KEEPCNT": PROBES,
        }
        for line in self._lines:
            line.settimeout(SEND_SECONDS)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in keepalive.items():
                if hasattr(socket, option):
                    line.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def fail(self, sentence: str) -> None:
        """Tell the other ranks that this one stops, and why. The caller then leaves.

        Does not return when this process is being ended already, with another sentence.
        """
        with self._lock:
            is_first = not self._leaving.is_set()
            self._leaving.set()
        if not is_first and threading.current_thread() is not self._thread:
            self._thread.join()
        self._tell({"failed": self.rank, "sentence": printable(sentence)})

    def wait_for_news(self, seconds: float) -> None:
        """Wait for word of what ended a collective: when it comes this process ends here, saying it."""
        self._thread.join(seconds)

    def silent(self, seconds: float) -> list[int]:
        """Ask the neighbours whether they are there; those that do not answer within `seconds`: stopped, or stuck."""
        asked = {peer.rank for peer in self._lines.values()}
        self._answered.clear()
        self._tell({"ask": self.rank})
        deadline = time.monotonic() + seconds
        while not self._answered.issuperset(asked) and self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(0.05)
        return sorted(asked - self._answered)

    def close(self) -> None:
        """Leave in order: tell the others, and return when they too are done (or gone)."""
        self._all_below_finished.wait(self._seconds)
        if self._parent is not None:
            self._tell({"finished": self.rank}, only=self._parent)
            self._all_finished.wait(self._seconds)
        # Rank 0 hears last that nobody can fail any more, and lets the others go; each passes it on.
        self._tell({"finished": self.rank}, but=self._parent)
        self._leaving.set()
        self._written.send(b"\0")
        self._thread.join(2)
        if self._previous_fd is not None:
            signal.set_wakeup_fd(self._previous_fd)
        for line in (*self._lines, self._signals, self._written):
            line.close()

    def _tell(self, message: dict, but: int | None = None, only: int | None = None) -> None:
        payload = json.dumps(message).encode()
        with self._sending:
            for line, peer in list(self._lines.items()):
                if peer.rank != but and only in (None, peer.rank):
                    with contextlib.suppress(OSError):  # that rank is gone too
                        line.sendall(peer.frames.pack(payload))

    def _watch(self) -> None:
        try:
            self._watch_lines()
        except Exception as error:
            sentence = f"the line that tells of lost ranks failed: {type(error).__name__}: {error}."
            self._tell({"failed": self.rank, "sentence": printable(sentence)})
            self._end(printable(sentence))

    def _watch_lines(self) -> None:
        with selectors.DefaultSelector() as selector:
            for line in (*self._lines, self._signals):
                selector.register(line, selectors.EVENT_READ)
            while not self._leaving.is_set():
                for key, _ in selector.select(timeout=1):
                    line = key.fileobj
                    if line is self._signals:
                        self._on_signal(self._signals.recv(1)[0])
                        continue
                    peer, unheard = self._lines[line], False
                    try:
                        data = line.recv(65536)
                    except OSError as error:
                        data, unheard = b"", error.errno in UNHEARD
                    if not data:
                        selector.unregister(line)
                        self._on_silence(peer.rank, unheard)
                        continue
                    for message in peer.frames.unpack(data):
                        self._on_message(peer.rank, message)
                try:
                    check_launcher()
                except UserError as error:
                    self._end(str(error))

    def _on_silence(self, rank: int, unheard: bool) -> None:
        """A line has ended: the peer's host said so, or (`unheard`) nothing came from it for too long."""
        if rank in self._finished:
            return
        # Only where there was a link, and no word came: the peer may be well, and this host the one that is cut off.
        is_cut_off = unheard and self._interface is not None and not has_link(self._interface)
        lost = self.rank if is_cut_off else rank
        sentence = SILENCE.format(rank=lost)
        self._tell({"lost": lost, "sentence": sentence}, but=rank)
        self._end(CUT_OFF.format(rank=lost, interface=self._interface) if is_cut_off else sentence)

    def _on_message(self, sender: int, message: dict) -> None:
        """A neighbour asks, answers, or says that all below it (the parent: that all) are done, or why all must end."""
        if "ask" in message:
            self._tell({"answer": self.rank}, only=sender)
            return
        if "answer" in message:
            self._answered.add(sender)
            return
        if "finished" in message:
            self._finished.add(sender)
            if sender == self._parent:
                self._all_finished.set()
            elif self._finished.issuperset(peer.rank for peer in self._lines.values() if peer.rank != self._parent):
                self._all_below_finished.set()
            return
        self._tell(message, but=sender)
        sentence = printable(message["sentence"])
        self._end(sentence if "lost" in message else f"stopped because rank {int(message['failed'])} did: {sentence}")

    def _on_signal(self, number: int) -> None:
        if number not in (signal.SIGINT, signal.SIGTERM):
            return
        # The main thread's handler raises where it can; a collective it sits in cannot be left otherwise.
        if not self._leaving.wait(GRACE_SECONDS):
            sentence = f"stopped by {signal.Signals(number).name}."
            self.fail(sentence)
            leave(self.rank, sentence, 128 + number)

    def _end(self, sentence: str) -> None:
        with self._lock:
            if self._leaving.is_set():  # the main thread is saying why already
                return
            self._leaving.set()
        leave(self.rank, sentence, 1)


def leave(rank: int, sentence: str, exit_code: int) -> None:
    """End this process now, with one sentence on standard error and nothing half-written."""
    try:
        remove_unfinished()
        say_last(rank, sentence)
        if rank == 0:
            time.sleep(0.2)  # rank 0 serves the store: let the others read their news before their peer vanishes
    finally:
        os._exit(exit_code)


def say_last(rank: int | None, sentence: str) -> None:
    """Print why this process ends on standard error, with its rank where there are others."""
    with contextlib.suppress(OSError, ValueError):  # whoever read one of the two may be gone
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        # The line may hold a progress bar: start afresh on it.
        start = "\r\033[K" if sys.stderr.isatty() else ""
        print(f"{start}{'' if rank is None else f'rank {rank}: '}{sentence}", file=sys.stderr, flush=True)
