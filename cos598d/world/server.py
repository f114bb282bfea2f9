"""What rank 0 serves to the others: a key-value store, and exchanges in which every rank gives and gets one value."""

import contextlib
import json
import os
import queue
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from cos598d.world import handshake
from cos598d.world.channel import DIGEST_BYTES, READ_BYTES, Frames, ProtocolError, from_text, numbered, to_text
from cos598d.world.handshake import Acceptor

# Bytes of a message to the server: from a connection that is not a member yet, and from a rank of the world.
LARGEST_ARRIVAL, LARGEST_REQUEST = 1 << 18, 1 << 30
OPEN_TO_ALL = ("arrive", "leave", "object")
LATER = object()  # the result of an operation whose answer is sent when something has happened


class Connection:
    """A rank's connection. What is sent to it waits in `unsent`, since the server waits for nobody.

    At first it may only arrive, leave or object. A member is a rank of the world, and may ask for everything.
    """

    def __init__(self, its_socket: socket.socket, rank: int, frames: Frames, is_member: bool):
        self.socket, self.rank, self.frames, self.is_member = its_socket, rank, frames, False
        self.unsent = bytearray()
        if is_member:
            self.make_member()

    def make_member(self) -> None:
        """Take it into the world."""
        self.is_member, self.frames.largest = True, LARGEST_REQUEST


class StoreServer:
    """Serves at `listener`, in a thread of its own, every rank that proves that it knows `key`; drops everybody else.

    A request is [id, operation, argument, ...], the answer [id, value]. Values of keys are bytes, which travel in
    base64. Operations are the methods `on_...`, called in the server's thread as `on_...(connection, id, argument,
    ...)`. A request that none of them can read ends its connection. What many ranks are answered alike is encoded once.
    """

    def __init__(self, listener: socket.socket, key: bytes, world_size: int):
        self.world_size = world_size
        self.address, self.port = listener.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self.acceptor = Acceptor(listener, key, self._selector, LARGEST_ARRIVAL, world_size)
        self._values: dict[str, bytes] = {}
        self._encoded: dict[str, str] = {}  # values as JSON, of keys that were asked for since they were set
        self._waiting: dict[str, list[_Wait]] = {}
        self._exchanges: dict[str, _Exchange] = {}
        self._connections: set[Connection] = set()
        # Connections that may not stay, since when: the oldest first.
        self._guests: dict[Connection, float] = {}
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self)
        self._thread = threading.Thread(target=self._serve, name="rank 0's server", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Let the server's thread call `function`."""
        self._calls.put(function)
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"\0")

    def stop(self) -> None:
        """Stop serving: every connection ends."""
        self.call(sys.exit)
        self._thread.join(1)

    def connect_rank_0(self) -> tuple[socket.socket, Frames]:
        """A connection of rank 0's own, without the handshake, in front of which strangers may queue."""
        (mine, its), session = socket.socketpair(), os.urandom(DIGEST_BYTES)
        its.setblocking(False)
        connection = Connection(its, 0, Frames(session, accepted=True, largest=LARGEST_REQUEST), is_member=True)
        self.call(lambda: self._add(connection))
        return mine, Frames(session, accepted=False, largest=LARGEST_REQUEST)

    @property
    def place(self) -> tuple[str, int]:
        """Where a process of this host connects."""
        anywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        return anywhere.get(self.address, self.address), self.port

    def answer(self, connection: Connection, number: int, value: Any) -> None:
        """Answer request `number` of `connection`. In the server's thread."""
        self._send(connection, json.dumps([number, value]).encode())

    def answer_all(self, asked: Iterable[tuple[Connection, int]], text: str) -> None:
        """Answer several requests with the same value, given as JSON. In the server's thread."""
        for connection, number in asked:
            self._send(connection, f"[{number},{text}]".encode())

    def on_gone(self, connection: Connection) -> None:
        """A rank's connection has ended."""

    def on_set(self, connection: Connection, number: int, key: str, value: str) -> None:
        self._put(key, from_text(value))

    def on_add(self, connection: Connection, number: int, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._put(key, str(total).encode())
        return total

    def on_append(self, connection: Connection, number: int, key: str, value: str) -> None:
        self._put(key, self._values.get(key, b"") + from_text(value))

    def on_compare_set(self, connection: Connection, number: int, key: str, expected: str, desired: str) -> str:
        found = self._values.get(key)
        if found == from_text(expected) or (found is None and not expected):
            self._put(key, from_text(desired))
            return desired
        return expected if found is None else to_text(found)

    def on_delete(self, connection: Connection, number: int, key: str) -> bool:
        self._encoded.pop(key, None)
        return self._values.pop(key, None) is not None

    def on_count(self, connection: Connection, number: int) -> int:
        return len(self._values)

    def on_check(self, connection: Connection, number: int, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def on_wait(self, connection: Connection, number: int, keys: list[str]) -> Any:
        """Answer with the values of `keys` when all of them exist."""
        missing = {key for key in keys if key not in self._values}
        wait = _Wait(connection, number, keys, missing)
        for key in missing:
            self._waiting.setdefault(key, []).append(wait)
        if not missing:
            self._answer_wait(wait)
        return LATER

    def on_exchange(self, connection: Connection, number: int, name: str, value: Any, root: int | None) -> Any:
        """Take a rank's value; answer with every rank's when all have come (at once with None to all but `root`).

        What several ranks say alike travels once: the answer is [distinct values, the place of each rank's in them].
        """
        exchange = self._exchanges.setdefault(name, _Exchange())
        exchange.values[connection.rank] = json.dumps(value)
        if root is None or connection.rank == root:
            exchange.asked.append((connection, number))
        if len(exchange.values) == self.world_size:
            del self._exchanges[name]
            places, of_ranks = numbered([exchange.values[rank] for rank in range(self.world_size)])
            self.answer_all(exchange.asked, f"[[{','.join(places)}],{json.dumps(of_ranks, separators=(',', ':'))}]")
        return None if root not in (None, connection.rank) else LATER

    def on_absent(self, connection: Connection, number: int, name: str) -> list[int]:
        """The ranks that have given nothing to an exchange."""
        given = self._exchanges[name].values if name in self._exchanges else ()
        return [rank for rank in range(self.world_size) if rank not in given]

    def _put(self, key: str, value: bytes) -> None:
        """Keep a value, and answer those who waited for `key` and for nothing else."""
        self._values[key] = value
        self._encoded.pop(key, None)
        for wait in self._waiting.pop(key, ()):
            wait.missing.discard(key)
            if not wait.missing and wait.connection in self._connections and all(k in self._values for k in wait.keys):
                self._answer_wait(wait)

    def _answer_wait(self, wait: "_Wait") -> None:
        for key in wait.keys:
            if key not in self._encoded:
                self._encoded[key] = json.dumps(to_text(self._values[key]))
        self.answer_all([(wait.connection, wait.number)], f"[{','.join(self._encoded[key] for key in wait.keys)}]")

    def _serve(self) -> None:
        try:
            while True:
                self._drop_guests()
                for ready, events in self._selector.select(self.acceptor.sweep()):
                    if ready.data is self.acceptor:
                        self._accept(ready.fileobj)
                    elif ready.data is self:
                        self._woken.recv(READ_BYTES)
                        while not self._calls.empty():
                            self._calls.get()()
                    elif ready.data in self._connections:
                        self._attend(ready.data, events)
        except SystemExit:
            pass
        finally:  # the ranks see their connections end, and stop with a sentence
            for connection in self._connections:
                connection.socket.close()
            self.acceptor.close()

    def _accept(self, ready: object) -> None:
        accepted = self.acceptor.advance(ready)
        if accepted:
            its_socket, rank, frames, key = accepted
            # The first key is that of a rank that comes to the rendezvous.
            self._add(Connection(its_socket, rank, frames, is_member=key > 0))

    def _add(self, connection: Connection) -> None:
        self._connections.add(connection)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        if not connection.is_member:
            self.make_guest(connection)

    def make_guest(self, connection: Connection) -> None:
        """Let it stay for `handshake.PENDING_SECONDS`, no more. In the server's thread."""
        self.let_stay(connection)
        self._guests[connection] = time.monotonic()

    def let_stay(self, connection: Connection) -> None:
        """Let it stay: it waits for the verdict. In the server's thread."""
        self._guests.pop(connection, None)

    def _drop_guests(self) -> None:
        """Drop guests that stayed too long or are too many: without a secret, anybody can prove the first key."""
        too_many = len(self._guests) - handshake.MOST_PENDING // 2 - max(self.acceptor.expected, 0)
        while self._guests:
            guest, since = next(iter(self._guests.items()))
            if too_many <= 0 and time.monotonic() - since <= handshake.PENDING_SECONDS:
                return
            too_many -= 1
            self._guests.pop(guest)
            self._drop(guest)

    def _attend(self, connection: Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
            if events & selectors.EVENT_READ:
                data = connection.socket.recv(READ_BYTES)
                if not data:
                    raise ProtocolError("gone")
                for number, operation, *arguments in connection.frames.unpack(data):
                    if not connection.is_member and operation not in OPEN_TO_ALL:
                        raise ProtocolError("not a member yet")
                    value = getattr(self, f"on_{operation}")(connection, number, *arguments)
                    if value is not LATER:
                        self.answer(connection, number, value)
        except BlockingIOError:
            pass
        except Exception:  # whatever it sent, it is the sender's connection that ends
            self._drop(connection)

    def _send(self, connection: Connection, payload: bytes) -> None:
        if connection not in self._connections:  # gone since it asked
            return
        connection.unsent += connection.frames.pack(payload)
        try:
            self._flush(connection)
        except OSError:
            self._drop(connection)

    def _flush(self, connection: Connection) -> None:
        unsent = connection.unsent
        with contextlib.suppress(BlockingIOError):
            while unsent:
                del unsent[: connection.socket.send(memoryview(unsent)[:READ_BYTES].tobytes())]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
        self._selector.modify(connection.socket, events, connection)

    def _drop(self, connection: Connection) -> None:
        if connection in self._connections:
            self._connections.discard(connection)
            self._guests.pop(connection, None)
            self._selector.unregister(connection.socket)
            connection.socket.close()
            self.on_gone(connection)


@dataclass
class _Wait:
    connection: Connection
    number: int
    keys: list[str]
    missing: set[str]


@dataclass
class _Exchange:
    values: dict[int, str] = field(default_factory=dict)  # by rank, as JSON
    asked: list[tuple[Connection, int]] = field(default_factory=list)
