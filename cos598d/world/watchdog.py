"""The watchdog between the ranks: when one is lost, it tells every rank at once which one.

A collective whose peer died may hang until its timeout, and its error does not name the peer. So each rank keeps idle
TCP connections to its neighbours in a tree. Except in large worlds, that is a star around rank 0 (`neighbours`). The
kernel closes them when the process ends, in whatever way, and TCP's keepalive closes them when a host falls silent. A
neighbour reads the end of the stream and tells its other neighbours which rank it was; they pass it on. A rank that
fails with a sentence sends that sentence first, so that all can repeat it. A rank passes on news before it ends, so its
own end is never news. Ranks that wait for each other forever are found in the same way (`deadlock`).

The thread that watches the connections may have to end the process by `os._exit`: the main thread may be inside a
collective, which nothing else can interrupt.
"""

import contextlib
import errno
import selectors
import signal
import socket
import threading
import time
from collections.abc import Sequence

from cos598d.errors import UsageError, UserError
from cos598d.terminal.printable import printable
from cos598d.terminal.signals import is_noted
from cos598d.world.connection import READ_BYTES, Connection
from cos598d.world.exit import exit_now, lost_rank
from cos598d.world.identity import check_launcher
from cos598d.world.meeting import Meeting
from cos598d.world.neighbours import connect_neighbours, parent_of
from cos598d.world.network import has_link, interface_with_link

# The others report that they lost this rank. So it reports that too, with the reason that only it can see.
CUT_OFF = "lost connection to this rank, {rank}: its network interface {interface} has no link. Check that network."
# How a connection ends when nothing arrives from the neighbour's host. If only the neighbour ended, its host reports
# that.
UNHEARD = frozenset((errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN))
PROBES = 3  # of TCP's keepalive, unanswered, before a host counts as silent
SEND_SECONDS = 5.0  # a neighbour that accepts no message for this long gets no more
GRACE_SECONDS = 2.0  # how long the main thread may take to end by itself after a signal


class Watchdog:
    """This rank's connections to its neighbours. Every rank of a world of several creates one, after the rendezvous.

    Between `__init__` and `close`, this process ends itself with exit code 1 and a sentence when another rank is lost.
    """

    def __init__(self, meeting: Meeting):
        self.rank = meeting.identity.rank
        self._seconds, self._deadlocks = meeting.seconds, meeting.deadlocks
        self._parent = parent_of(self.rank)
        self._neighbours: list[Connection] = []
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._leaving = threading.Event()
        self._finished: set[int] = set()
        self._answered: set[int] = set()
        self._all_below_finished, self._all_finished = threading.Event(), threading.Event()
        self._connect(meeting)
        self._interface = interface_with_link(self._neighbours[0].socket.getsockname()[0])
        self._signals, written = socket.socketpair()
        written.setblocking(False)
        self._written = written
        self._previous_fd = None
        if threading.current_thread() is threading.main_thread():
            # Python's own handlers wait for the main thread; this wakes ours even while that is blocked in a
            # collective.
            self._previous_fd = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def _connect(self, meeting: Meeting) -> None:
        self._neighbours, missing = connect_neighbours(meeting)
        if missing:
            sentence = lost_rank(", ".join(map(str, missing)))
            self._tell({"lost": missing[0], "sentence": sentence})
            raise UserError(sentence)
        if not self._children():
            self._all_below_finished.set()
        silence = meeting.identity.silence_seconds
        interval = silence // (PROBES + 1)
        keepalive = {
            "TCP_KEEPIDLE": silence - PROBES * interval,
            "TCP_KEEPINTVL": interval,
            "TCP_KEEPCNT": PROBES,
        }
        for neighbour in self._neighbours:
            neighbour.socket.settimeout(SEND_SECONDS)
            neighbour.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in keepalive.items():
                if hasattr(socket, option):
                    neighbour.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def _children(self) -> set[int]:
        return {neighbour.rank for neighbour in self._neighbours} - {self._parent}

    def fail(self, sentence: str, exit_code: int = 1) -> None:
        """Tell the other ranks that this one stops, and why. The caller then ends the process, with `exit_code`.

        The others use the same code if it means that a restart would not help, else 1.

        It does not return if the process is already ending with another sentence.
        """
        with self._lock:
            is_first = not self._leaving.is_set()
            self._leaving.set()
        if not is_first and threading.current_thread() is not self._thread:
            self._thread.join()
        self._tell({"failed": self.rank, "sentence": printable(sentence), "exit_code": exit_code})

    @property
    def waited_for(self) -> str:
        """A phrase for what this rank waits for; "" if that is not known."""
        return self._deadlocks.what

    def wait_for_news(self, seconds: float) -> None:
        """Wait for news of what ended a collective. If it comes, this process prints it and ends here."""
        self._thread.join(seconds)

    def silent_neighbours(self, seconds: float) -> list[int]:
        """Ask the neighbours for an answer. Return those that give none within `seconds`: stopped, or stuck."""
        asked = {neighbour.rank for neighbour in self._neighbours}
        self._answered.clear()
        self._tell({"ask": self.rank})
        deadline = time.monotonic() + seconds
        while not self._answered.issuperset(asked) and self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(0.05)
        return sorted(asked - self._answered)

    def close(self) -> None:
        """Leave in order, as at a barrier: tell the others, and return when they too are done (or lost)."""
        self._all_below_finished.wait(self._seconds)
        if self._parent is not None:
            self._tell({"finished": self.rank}, only=self._parent)
            self._all_finished.wait(self._seconds)
        # When all ranks have reported to rank 0, none can fail any more: it releases its children, and they theirs.
        self._tell({"finished": self.rank}, but=self._parent)
        self._leaving.set()
        self._written.send(b"\0")
        self._thread.join(2)
        if self._previous_fd is not None:
            signal.set_wakeup_fd(self._previous_fd)
        for line in (*(neighbour.socket for neighbour in self._neighbours), self._signals, self._written):
            line.close()

    def _tell(self, message: dict, but: int | None = None, only: int | None = None) -> None:
        with self._sending:
            for neighbour in self._neighbours:
                if neighbour.rank != but and only in (None, neighbour.rank):
                    with contextlib.suppress(OSError):  # that rank is lost too
                        neighbour.send(message)

    def _watch(self) -> None:
        try:
            self._watch_connections()
        except Exception as error:
            sentence = printable(f"the watchdog failed: {type(error).__name__}: {error}.")
            self._tell({"failed": self.rank, "sentence": sentence})
            self._end(sentence)

    def _watch_connections(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals, selectors.EVENT_READ)
            for neighbour in self._neighbours:
                selector.register(neighbour.socket, selectors.EVENT_READ, neighbour)
            while not self._leaving.is_set():
                for key, _ in selector.select(timeout=1):
                    if key.fileobj is self._signals:
                        self._on_signal(self._signals.recv(1)[0])
                        continue
                    neighbour, unheard = key.data, False
                    try:
                        data = neighbour.socket.recv(READ_BYTES)
                    except OSError as error:
                        data, unheard = b"", error.errno in UNHEARD
                    if not data:
                        selector.unregister(neighbour.socket)
                        self._on_end(neighbour.rank, unheard)
                        continue
                    for message, _ in neighbour.unpack(data):
                        self._on_message(neighbour.rank, message)
                overdue = self._deadlocks.overdue()
                if overdue is not None:
                    self._tell({"waits": overdue})
                try:
                    check_launcher()
                except UserError as error:
                    self._end(str(error))

    def _on_end(self, rank: int, unheard: bool) -> None:
        """The connection to `rank` has ended: its host reported it, or (`unheard`) nothing came from there for long."""
        if rank in self._finished:
            return
        # If nothing came and this host's link is down, the neighbour may be well, and this host may be cut off.
        is_cut_off = unheard and self._interface is not None and not has_link(self._interface)
        lost = self.rank if is_cut_off else rank
        sentence = lost_rank(lost)
        self._tell({"lost": lost, "sentence": sentence}, but=rank)
        self._end(CUT_OFF.format(rank=lost, interface=self._interface) if is_cut_off else sentence)

    def _on_message(self, sender: int, message: dict) -> None:
        """A neighbour asks, answers, reports why all must end, or that all on its side are done."""
        if "ask" in message:
            self._tell({"answer": self.rank}, only=sender)
            return
        if "answer" in message:
            self._answered.add(sender)
            return
        if "waits" in message:
            self._on_waiting(sender, message["waits"], message.get("asked"))
            return
        if "finished" in message:
            self._finished.add(sender)
            if sender == self._parent:
                self._all_finished.set()
            elif self._finished >= self._children():
                self._all_below_finished.set()
            return
        self._tell(message, but=sender)
        sentence = printable(message["sentence"])
        if "lost" in message:
            self._end(sentence)
        else:
            exit_code = UsageError.exit_code if message.get("exit_code") == UsageError.exit_code else 1
            self._end(f"stopped because rank {int(message['failed'])} did: {sentence}", exit_code)

    def _on_waiting(self, sender: int, waits: Sequence, asked: Sequence | None) -> None:
        """Another rank has waited for long, or (`asked`) also waits, and has not begun what this one asked for."""
        if asked is None:
            instead = self._deadlocks.instead_of(waits)
            if instead is not None:
                self._tell({"waits": instead, "asked": waits}, only=sender)
            return
        sentence = self._deadlocks.sentence(self.rank, sender, asked, waits)
        if sentence:
            self._tell({"failed": self.rank, "sentence": sentence})
            self._end(sentence)

    def _on_signal(self, number: int) -> None:
        if is_noted(number) or number not in (signal.SIGINT, signal.SIGTERM):
            return
        # The main thread's handler raises where it can. From a collective there is no other way out than this.
        if not self._leaving.wait(GRACE_SECONDS):
            sentence = f"stopped by {signal.Signals(number).name}."
            self.fail(sentence)
            exit_now(self.rank, sentence, 128 + number)

    def _end(self, sentence: str, exit_code: int = 1) -> None:
        with self._lock:
            if self._leaving.is_set():  # the main thread is already reporting why
                return
            self._leaving.set()
        exit_now(self.rank, sentence, exit_code)
