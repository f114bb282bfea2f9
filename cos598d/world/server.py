"""What rank 0 serves to the others: keys and values, and exchanges in which every rank gives and gets one value."""

import contextlib
import json
import os
import queue
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from cos598d.world import channel
from cos598d.world.channel import Door, Frames, Stranger

# Bytes of a message to the server: from who only comes to meet, and from a rank that has met.
LARGEST_ARRIVAL, LARGEST_REQUEST = 1 << 18, 1 << 30
_READ_BYTES = 1 << 18
OPEN_TO_ALL = ("arrive", "leave", "object")
LATER = object()  # what an operation returns that answers when something has happened


class Line:
    """A rank's connection. What it is sent waits in `unsent`, since the server waits for nobody.

    Before it is a member it may only arrive, leave or object, and it is a guest, for `channel.GUEST_SECONDS`, unless it
    waits for the verdict.
    """

    def __init__(self, connection: socket.socket, rank: int, frames: Frames, is_member: bool):
        self.connection, self.rank, self.frames, self.is_member = connection, rank, frames, False
        self.unsent = bytearray()
        self.is_guest, self.since = not is_member, time.monotonic()
        if is_member:
            self.make_member()

    def make_member(self) -> None:
        """It has met the others."""
        self.is_member, self.is_guest, self.frames.largest = True, False, LARGEST_REQUEST


class Server:
    """Serves at `listener`, in a thread of its own, whoever proves to know `key`; drops everybody else.

    A request is [id, operation, argument, ...], the answer [id, value]. Values of keys are bytes, which travel as text
    of the characters 0 to 255. Operations are the methods `on_...`, called in the server's thread as
    `on_...(line, id, argument, ...)`. A request that none of them can read ends its connection.
    """

    def __init__(self, listener: socket.socket, key: bytes, world_size: int):
        self.world_size = world_size
        self.address, self.port = listener.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self.door = Door(listener, key, self._selector, LARGEST_ARRIVAL, world_size)
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[_Wait]] = {}
        self._exchanges: dict[str, _Exchange] = {}
        self._lines: set[Line] = set()
        self._guests: list[Line] = []
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self)
        self._thread = threading.Thread(target=self._serve, name="meeting point", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Let the server's thread call `function`."""
        self._calls.put(function)
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"\0")

    def stop(self) -> None:
        """Serve no longer: every connection ends."""
        self.call(sys.exit)
        self._thread.join(1)

    def join(self) -> tuple[socket.socket, Frames]:
        """A connection of rank 0's own, past the door, where strangers may stand in a queue."""
        (mine, its), session = socket.socketpair(), os.urandom(channel.DIGEST_BYTES)
        its.setblocking(False)
        line = Line(its, 0, Frames(session, accepted=True, largest=LARGEST_REQUEST), is_member=True)
        self.call(lambda: self._add(line))
        return mine, Frames(session, accepted=False, largest=LARGEST_REQUEST)

    @property
    def place(self) -> tuple[str, int]:
        """Where a process of this host connects."""
        anywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        return anywhere.get(self.address, self.address), self.port

    def answer(self, line: Line, number: int, value: Any) -> None:
        """Answer request `number` of `line`. In the server's thread."""
        self._send(line, json.dumps([number, value]).encode())

    def on_gone(self, line: Line) -> None:
        """A rank's connection has ended."""

    def on_set(self, line: Line, number: int, key: str, value: str) -> None:
        self._values[key] = value.encode("latin-1")
        self._tell(key)

    def on_add(self, line: Line, number: int, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        self._tell(key)
        return total

    def on_append(self, line: Line, number: int, key: str, value: str) -> None:
        self._values[key] = self._values.get(key, b"") + value.encode("latin-1")
        self._tell(key)

    def on_compare_set(self, line: Line, number: int, key: str, expected: str, desired: str) -> str:
        found = self._values.get(key)
        if found == expected.encode("latin-1") or (found is None and not expected):
            self.on_set(line, number, key, desired)
            return desired
        return expected if found is None else found.decode("latin-1")

    def on_delete(self, line: Line, number: int, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def on_count(self, line: Line, number: int) -> int:
        return len(self._values)

    def on_check(self, line: Line, number: int, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def on_wait(self, line: Line, number: int, keys: list[str]) -> Any:
        """Answer with the values of `keys` when all are there."""
        missing = {key for key in keys if key not in self._values}
        wait = _Wait(line, number, keys, missing)
        for key in missing:
            self._waiting.setdefault(key, []).append(wait)
        return LATER if missing else self._texts(keys)

    def on_exchange(self, line: Line, number: int, name: str, value: Any, root: int | None) -> Any:
        """Take a rank's value; answer with all ranks' when they are there (with None at once to all but `root`)."""
        exchange = self._exchanges.setdefault(name, _Exchange())
        exchange.values[line.rank] = value
        if root is None or line.rank == root:
            exchange.asked.append((line, number))
        if len(exchange.values) == self.world_size:
            del self._exchanges[name]
            # Made once: this is the largest message that there is, and goes to every rank.
            values = json.dumps([exchange.values[rank] for rank in range(self.world_size)])
            for asker, its_number in exchange.asked:
                self._send(asker, f"[{its_number},{values}]".encode())
        return None if root not in (None, line.rank) else LATER

    def on_absent(self, line: Line, number: int, name: str) -> list[int]:
        """The ranks that have given nothing to an exchange."""
        given = self._exchanges[name].values if name in self._exchanges else ()
        return [rank for rank in range(self.world_size) if rank not in given]

    def _texts(self, keys: list[str]) -> list[str]:
        return [self._values[key].decode("latin-1") for key in keys]

    def _tell(self, key: str) -> None:
        for wait in self._waiting.pop(key, ()):
            wait.missing.discard(key)
            if not wait.missing and wait.line in self._lines and all(each in self._values for each in wait.keys):
                self.answer(wait.line, wait.number, self._texts(wait.keys))

    def _serve(self) -> None:
        try:
            while True:
                self._drop_guests()
                for ready, events in self._selector.select(self.door.sweep()):
                    if ready.data is self.door:
                        self._admit(ready.fileobj)
                    elif ready.data is self:
                        self._woken.recv(_READ_BYTES)
                        while not self._calls.empty():
                            self._calls.get()()
                    elif ready.data in self._lines:
                        self._attend(ready.data, events)
        except SystemExit:
            pass
        finally:  # the ranks see the end of their lines, and stop with a sentence
            for line in self._lines:
                line.connection.close()
            self.door.close()

    def _admit(self, line: socket.socket) -> None:
        admitted = self.door.admit(line)
        if admitted:
            connection, rank, frames, key = admitted
            # The first key is that of who comes to meet.
            self._add(Line(connection, rank, frames, is_member=key > 0))

    def _add(self, line: Line) -> None:
        self._lines.add(line)
        self._selector.register(line.connection, selectors.EVENT_READ, line)
        if line.is_guest:
            self._guests.append(line)

    def make_guest(self, line: Line) -> None:
        """It may stay for a little longer. In the server's thread."""
        line.is_guest, line.since = True, time.monotonic()
        self._guests = [*(guest for guest in self._guests if guest is not line), line]

    def _drop_guests(self) -> None:
        """Drop who proved the first key, which without a secret anybody can, and stayed: the late and the too many."""
        self._guests = [line for line in self._guests if line.is_guest and line in self._lines]
        too_many = len(self._guests) - channel.GUESTS // 2 - max(self.door.expected, 0)
        for place, line in enumerate(self._guests):
            if place < too_many or time.monotonic() - line.since > channel.GUEST_SECONDS:
                self._drop(line)

    def _attend(self, line: Line, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(line)
            if events & selectors.EVENT_READ:
                data = line.connection.recv(_READ_BYTES)
                if not data:
                    raise Stranger("gone")
                for number, operation, *arguments in line.frames.unpack(data):
                    if not line.is_member and operation not in OPEN_TO_ALL:
                        raise Stranger("not met yet")
                    value = getattr(self, f"on_{operation}")(line, number, *arguments)
                    if value is not LATER:
                        self.answer(line, number, value)
        except BlockingIOError:
            pass
        except Exception:  # whatever it sent: it is the sender's connection that ends
            self._drop(line)

    def _send(self, line: Line, payload: bytes) -> None:
        if line not in self._lines:  # gone since it asked
            return
        line.unsent += line.frames.pack(payload)
        try:
            self._flush(line)
        except OSError:
            self._drop(line)

    def _flush(self, line: Line) -> None:
        with contextlib.suppress(BlockingIOError):
            while line.unsent:
                del line.unsent[: line.connection.send(memoryview(line.unsent)[:_READ_BYTES].tobytes())]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.unsent else 0)
        self._selector.modify(line.connection, events, line)

    def _drop(self, line: Line) -> None:
        if line in self._lines:
            self._lines.discard(line)
            self._selector.unregister(line.connection)
            line.connection.close()
            self.on_gone(line)


class _Wait:
    def __init__(self, line: Line, number: int, keys: list[str], missing: set[str]):
        self.line, self.number, self.keys, self.missing = line, number, keys, missing


class _Exchange:
    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.asked: list[tuple[Line, int]] = []
