"""The lifeline: one idle TCP connection from every rank to rank 0, so that all hear at once which rank is lost.

The kernel closes a process's connections when it ends, in whatever way, and TCP's keepalive closes them when its host
falls silent. Rank 0 reads the end of the stream, and tells all other ranks. A rank that fails with a sentence sends
that first. The thread may have to end the process by `os._exit`: the main thread may be inside a collective.
"""

import contextlib
import json
import secrets
import selectors
import socket
import threading
import time
from typing import Any

import torch.distributed as dist

from cos598d.errors import UsageError, UserError
from cos598d.terminal.printable import printable
from cos598d.terminal.words import ranks_in_words
from cos598d.world.end import exit_now, lost
from cos598d.world.identity import launcher_has_ended
from cos598d.world.meet import bind
from cos598d.world.meeting import Meeting

CONNECT_SECONDS = 10.0
KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}  # a host is lost after 8 seconds of silence
POLL_SECONDS = 0.5  # how often a rank looks whether its launcher still runs, and rank 0 still answers
NEWS_SECONDS = 3.0  # how long a rank whose collective broke waits for news of which rank was lost


class Lifeline:
    """This rank's connections: rank 0's to all others, theirs to rank 0.

    Between `__init__` and `close`, this process ends itself with exit code 1 and a sentence when another rank is lost.
    """

    def __init__(self, meeting: Meeting):
        self.rank, self._meeting = meeting.identity.rank, meeting
        self._ended, self._sending = threading.Event(), threading.Lock()
        self._done: set[int] = set()
        self._all_done = threading.Event()
        self._peers: dict[int, socket.socket] = {}
        if self.rank == 0:
            self._accept()
        else:
            self._peers[0] = self._connect()
        for line in self._peers.values():
            line.settimeout(5.0)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):
                    line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._thread = threading.Thread(target=self._watch, name="lifeline", daemon=True)
        self._thread.start()

    def fail(self, sentence: str, exit_code: int = 1) -> None:
        """Tell the other ranks that this one stops, and why. The caller then ends the process."""
        self._ended.set()
        self._tell({"end": f"stopped because rank {self.rank} did: {printable(sentence)}", "exit_code": exit_code})

    def explain(self) -> str:
        """After a collective broke or timed out: a phrase that names who did not take part.

        First it waits for news of a lost rank, which ends this process.
        """
        ranks, meeting = range(self._meeting.identity.world_size), self._meeting
        with contextlib.suppress(dist.DistError), meeting.asking(NEWS_SECONDS):  # the store ends with rank 0
            meeting.store.set(f"broke/{self.rank}", "")
            self._thread.join(NEWS_SECONDS)
            silent = [rank for rank in ranks if not meeting.store.check([f"broke/{rank}"])]
            if silent:
                return f"{ranks_in_words(silent)} did not take part (stopped, or stuck?)"
            return "all ranks wait for each other, in different collectives"
        self._thread.join(NEWS_SECONDS)
        return "rank 0 does not answer"

    def close(self) -> None:
        """Leave in order, as at a barrier: return when all other ranks are done, too.

        Raises UserError with the ranks that were not done within the meeting's seconds.
        """
        if self.rank != 0:
            self._tell({"done": self.rank})
        if not self._all_done.wait(self._meeting.seconds):
            late = sorted(self._peers.keys() - self._done)
            raise UserError(
                f"{ranks_in_words(late)} did not end within {self._meeting.seconds:g} s (stopped, or stuck?)."
            )
        if self.rank == 0:
            self._tell({"done": self.rank})
        self._ended.set()
        for line in self._peers.values():
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)  # so that the thread wakes up at once
        self._thread.join(2)
        for line in self._peers.values():
            line.close()

    def _accept(self) -> None:
        """On rank 0: wait until all others have connected. Each proves with a token from the store that it is one."""
        identity = self._meeting.identity
        listener, token = bind(identity.listening_ip, 0), secrets.token_hex(16)
        listener.listen(identity.world_size + 16)
        self._meeting.store.set("lifeline", json.dumps([listener.getsockname()[1], token]))
        deadline = time.monotonic() + CONNECT_SECONDS
        with listener:
            while len(self._peers) < identity.world_size - 1 and time.monotonic() < deadline:
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                with contextlib.suppress(OSError, ValueError, TypeError):
                    line, _ = listener.accept()
                    line.settimeout(1.0)
                    rank, said = json.loads(line.recv(4096))
                    if secrets.compare_digest(said, token):
                        self._peers[rank] = line
        missing = sorted(set(range(1, identity.world_size)) - self._peers.keys())
        if missing:
            sentence = lost(ranks_in_words(missing))
            self._tell({"end": sentence})
            raise UserError(sentence)

    def _connect(self) -> socket.socket:
        try:
            port, token = json.loads(self._meeting.store.get("lifeline"))
            place = (self._meeting.identity.listening_ip, port)
            line = socket.create_connection(place, timeout=CONNECT_SECONDS)
            line.sendall(json.dumps([self.rank, token]).encode())
            return line
        except dist.DistError:
            raise UserError(lost("rank 0")) from None
        except OSError as error:
            raise UserError(f"rank 0 cannot be reached ({error}). Open its host's ports to the others.") from None

    def _tell(self, message: dict[str, Any], but: int | None = None) -> None:
        with self._sending:
            for rank, line in self._peers.items():
                with contextlib.suppress(OSError):  # that rank is lost, too
                    if rank != but:
                        line.sendall(json.dumps(message).encode() + b"\n")

    def _watch(self) -> None:
        heard: dict[int, bytes] = {}
        with selectors.DefaultSelector() as selector:
            for rank, line in self._peers.items():
                selector.register(line, selectors.EVENT_READ, rank)
            while not self._ended.is_set():
                for key, _ in selector.select(timeout=POLL_SECONDS):
                    try:
                        data = self._peers[key.data].recv(1 << 16)
                    except OSError:
                        data = b""
                    *whole, heard[key.data] = (heard.get(key.data, b"") + data).split(b"\n")
                    for text in whole:
                        self._hear(key.data, json.loads(text))
                    if not data:
                        selector.unregister(key.fileobj)
                        if key.data not in self._done:
                            self._end({"end": lost(f"rank {key.data}")}, key.data)
                self._look()

    def _look(self) -> None:
        """End this process if its launcher has ended, or if rank 0 does not answer."""
        if time.monotonic() > self._meeting.deadline:
            exit_now(self.rank, "rank 0 did not take part (stopped, or stuck?). Look there, or raise --timeout.", 1)
        if launcher_has_ended():
            again = "Repeat the command, with --resume auto if the run has saved a checkpoint."
            exit_now(self.rank, f"the program that started this worker has ended. {again}", 1)

    def _hear(self, sender: int, message: dict[str, Any]) -> None:
        if "end" in message:
            self._end(message, sender)
        self._done.add(sender)
        if len(self._done) == len(self._peers):
            self._all_done.set()

    def _end(self, message: dict[str, Any], sender: int) -> None:
        if self._ended.is_set():  # the main thread is already reporting why
            return
        if self.rank == 0:
            self._tell(message, but=sender)
        exit_now(self.rank, printable(message["end"]), UsageError.exit_code if message.get("exit_code") == 2 else 1)
