"""The line between the ranks that tells every one of them, at once and in words, when one is gone.

A collective whose peer died may hang until its timeout, and its error does not say who died. So each rank keeps
one idle TCP connection to rank 0. The kernel closes it when the process ends, however it ends, and TCP's keepalive
closes it when a host falls silent: rank 0 reads the end of the stream, knows the rank, and tells the others.
A rank that fails with a sentence sends that sentence first, so that all can repeat it.

The thread that watches the line leaves by `os._exit` where it must: the main thread may be inside a collective,
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
from cos598d.interfaces import has_link, interface_with_link
from cos598d.launch import LAUNCHER_PID
from cos598d.rendezvous import Meeting

SILENCE = "lost rank {rank}, which ended without a word (killed, or its host is gone)."
# The others say of this rank that they lost it, so it says so too, with what it alone can see.
CUT_OFF = "lost rank {rank}, this one: its network interface {interface} has no link."
# What a line ends with when its peer's host is silent, not the peer gone.
UNHEARD = frozenset((errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN))
# A host that is cut off is noticed after idle + interval x count = 8 seconds.
CONNECT_SECONDS = 10.0  # all have just met: whoever does not connect at once is gone
KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
# How long a rank that was told to stop may take to leave by itself.
GRACE_SECONDS = 2.0


class Lifeline:
    """This rank's end of the line. Made once by every rank of a `Meeting` with more than one rank.

    Between `__init__` and `close` this process ends itself, with exit code 1 and a sentence, when another rank is lost.
    """

    def __init__(self, meeting: Meeting):
        self.rank = meeting.identity.rank
        self._seconds = meeting.seconds
        self._peers: dict[socket.socket, int] = {}
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._finished: set[int] = set()
        self._all_finished = threading.Event()
        self._connect(meeting)
        self._interface = interface_with_link(next(iter(self._peers)).getsockname()[0])
        self._expected_parent = os.environ.get(LAUNCHER_PID)
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
        identity, others = meeting.identity, meeting.identity.world_size - 1
        if self.rank == 0:
            family = socket.AF_INET6 if ":" in identity.master_ip else socket.AF_INET
            with socket.create_server(("", 0), family=family, backlog=others) as server:
                server.settimeout(CONNECT_SECONDS)
                meeting.store.set("lifeline", str(server.getsockname()[1]))
                try:
                    while len(self._peers) < others:
                        line, _ = server.accept()
                        line.settimeout(CONNECT_SECONDS)
                        self._peers[line] = int.from_bytes(_receive_exactly(line, 4), "big")
                except OSError:
                    missing = sorted(set(range(1, others + 1)) - set(self._peers.values()))
                    sentence = SILENCE.format(rank=", ".join(map(str, missing)))
                    self._tell({"lost": missing[0], "sentence": sentence})
                    raise UserError(sentence) from None
        else:
            port = int(meeting.store.get("lifeline"))
            try:
                line = socket.create_connection((identity.master_ip, port), timeout=CONNECT_SECONDS)
                line.sendall(self.rank.to_bytes(4, "big"))
            except OSError as error:
                raise UserError(f"no lifeline to rank 0 at {identity.master_ip}:{port}: {error}.") from None
            self._peers[line] = 0
        for line in self._peers:
            line.setblocking(True)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, seconds in KEEPALIVE.items():
                if hasattr(socket, option):
                    line.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)

    def fail(self, sentence: str) -> None:
        """Tell the other ranks that this one stops, and why. The caller then leaves.

        Does not return when this process is being ended already, with another sentence.
        """
        with self._lock:
            is_first = not self._leaving.is_set()
            self._leaving.set()
        if not is_first and threading.current_thread() is not self._thread:
            self._thread.join()
        self._tell({"failed": self.rank, "sentence": sentence})

    def wait_for_news(self, seconds: float) -> None:
        """Wait for word of what ended a collective: when it comes this process ends here, saying it."""
        self._thread.join(seconds)

    def close(self) -> None:
        """Leave in order: tell the others, and return when they too are done (or gone)."""
        if self.rank != 0:
            self._tell({"finished": self.rank})
        self._all_finished.wait(self._seconds)
        if self.rank == 0:  # it hears last that nobody can fail any more, and lets the others go
            self._tell({"finished": 0})
        self._leaving.set()
        self._written.send(b"\0")
        self._thread.join(2)
        if self._previous_fd is not None:
            signal.set_wakeup_fd(self._previous_fd)
        for line in (*self._peers, self._signals, self._written):
            line.close()

    def _tell(self, message: dict, but: int | None = None) -> None:
        data = json.dumps(message).encode() + b"\n"
        for line, rank in list(self._peers.items()):
            if rank != but:
                with contextlib.suppress(OSError):  # that rank is gone too
                    line.sendall(data)

    def _watch(self) -> None:
        buffers = dict.fromkeys(self._peers, b"")
        with selectors.DefaultSelector() as selector:
            for line in (*self._peers, self._signals):
                selector.register(line, selectors.EVENT_READ)
            while not self._leaving.is_set():
                for key, _ in selector.select(timeout=1):
                    line = key.fileobj
                    if line is self._signals:
                        self._on_signal(self._signals.recv(1)[0])
                        continue
                    unheard = False
                    try:
                        data = line.recv(65536)
                    except OSError as error:
                        data, unheard = b"", error.errno in UNHEARD
                    if not data:
                        selector.unregister(line)
                        self._on_silence(self._peers[line], unheard)
                        continue
                    *messages, buffers[line] = (buffers[line] + data).split(b"\n")
                    for message in messages:
                        self._on_message(json.loads(message))
                if self._expected_parent and os.getppid() != int(self._expected_parent):
                    self._end("the program that started this worker is gone.")

    def _on_silence(self, rank: int, unheard: bool) -> None:
        """A line has ended: the peer's host said so, or (`unheard`) nothing came from it for too long."""
        if rank in self._finished:
            return
        # Only where there was a link, and no word came: the peer may be well, and this host the one that is cut off.
        is_cut_off = unheard and self._interface is not None and not has_link(self._interface)
        lost = self.rank if is_cut_off else rank
        sentence = SILENCE.format(rank=lost)
        if self.rank == 0:
            self._tell({"lost": lost, "sentence": sentence}, but=rank)
        self._end(CUT_OFF.format(rank=lost, interface=self._interface) if is_cut_off else sentence)

    def _on_message(self, message: dict) -> None:
        if "finished" in message:
            self._finished.add(message["finished"])
            if len(self._finished) == len(self._peers):
                self._all_finished.set()
        elif "lost" in message:
            self._end(message["sentence"])
        else:
            if self.rank == 0:
                self._tell(message, but=message["failed"])
            self._end(f"stopped because rank {message['failed']} did: {message['sentence']}")

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
    remove_unfinished()
    say_last(rank, sentence)
    if rank == 0:
        time.sleep(0.2)  # rank 0 serves the store: let the others read their news before their peer vanishes
    os._exit(exit_code)


def say_last(rank: int | None, sentence: str) -> None:
    """Print why this process ends on standard error, with its rank where there are others."""
    sys.stdout.flush()
    # The line may hold a progress bar: start afresh on it.
    start = "\r\033[K" if sys.stderr.isatty() else ""
    print(f"{start}{'' if rank is None else f'rank {rank}: '}{sentence}", file=sys.stderr, flush=True)


def _receive_exactly(line: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = line.recv(count - len(data))
        if not part:
            raise OSError("closed")
        data += part
    return data
