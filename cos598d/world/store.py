"""The ranks' key-value store: rank 0's table, and how each rank uses it; a torch.distributed.Store."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, Store

from cos598d.world.connection import Connection, Message, ProtocolError, connect

LARGEST_ANSWER = 1 << 31
CHECK_SECONDS = 1.0  # how often a waiting request checks that it should still wait
PATIENCE_SECONDS = 5.0  # rank 0 decides what came too late, so the others wait this much longer
# This text makes `rank` wait for the news of which rank is lost.
GONE = "Connection closed: rank 0, which serves the meeting point, is gone"


class StoreTimeout(DistStoreError):
    """A key did not appear in time."""


class KeyTable:
    """Keys and their values (bytes), for many threads. A request is an operation, its arguments and bytes.

    Once it is closed, whoever waits gets ConnectionAbortedError: that is not the end of the time to wait.
    """

    def __init__(self):
        self._values: dict[str, bytes] = {}
        self._came: dict[str, threading.Event] = {}  # keys for which something waits
        self._lock, self._is_closed = threading.Lock(), False

    def answer(self, operation: str, arguments: Sequence[Any], data: bytes) -> Message:
        """The answer to one request. Raises ProtocolError for an unknown operation."""
        if operation == "wait":
            return self._wait(*arguments)
        with self._lock:
            return self._answer_at_once(operation, arguments, data)

    def close(self) -> None:
        """End all waits."""
        with self._lock:
            self._is_closed = True
            for came in self._came.values():
                came.set()

    def _answer_at_once(self, operation: str, arguments: Sequence[Any], data: bytes) -> Message:
        values = self._values
        if operation == "count":
            return len(values), b""
        if operation == "check":
            return all(key in values for key in arguments), b""
        key, *rest = arguments
        if operation == "delete":
            return values.pop(key, None) is not None, b""
        found = values.get(key)
        if operation == "set":
            self._put(key, data)
        elif operation == "add":
            self._put(key, str(int(found or b"0") + rest[0]).encode())
        elif operation == "append":
            self._put(key, (found or b"") + data)
        elif operation == "compare_set":
            expected, desired = data[: rest[0]], data[rest[0] :]
            if found == expected or (found is None and not expected):
                self._put(key, desired)
            elif found is None:
                return None, expected
        else:
            raise ProtocolError(f"no operation {operation}")
        return None, b"" if operation in ("set", "append") else values[key]

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        came = self._came.pop(key, None)
        if came:
            came.set()

    def _wait(self, keys: Sequence[str], seconds: float) -> Message:
        """Each value's length, and the values one after the other, when all exist; None if they do not appear."""
        deadline, missing = time.monotonic() + seconds, keys
        while True:
            with self._lock:
                missing = [key for key in missing if key not in self._values]
                if not missing:
                    values = [self._values.get(key, b"") for key in keys]
                    return [len(value) for value in values], b"".join(values)
                came, is_closed = self._came.setdefault(missing[0], threading.Event()), self._is_closed
            if is_closed:
                raise ConnectionAbortedError("closed")
            if not came.wait(max(0.0, deadline - time.monotonic())):
                return None, b""


class StoreClient(Store):
    """The store at `place`, which admits holders of `key`, as `rank` uses it; a torch.distributed.Store.

    Several threads may use it at once: a thread that finds no free connection opens another. A request waits at most
    `seconds`, and calls `check`, which may raise, every second. Raises DistNetworkError if rank 0 is lost, and
    StoreTimeout if a key does not appear.
    """

    def __init__(
        self, place: tuple[str, int], key: bytes, rank: int, seconds: float, check: Callable[[], None] = lambda: None
    ):
        super().__init__()
        self.place, self.key, self.rank, self.seconds, self._check = place, key, rank, seconds, check
        # Any thread takes from it and puts back: a list's steps are atomic. Threads of torch keep no thread-locals.
        self._free: list[Connection] = []
        self.local_address = place[0]  # from which this rank reaches rank 0; known once a connection is open

    def open(self, seconds: float) -> None:
        """Connect. Raises what `connection.connect` does."""
        connection = connect(self.place, self.key, self.rank, seconds, LARGEST_ANSWER)
        self.local_address = connection.socket.getsockname()[0]
        self._free.append(connection)

    def request(self, operation: str, *arguments: Any, data: bytes = b"", seconds: float | None = None) -> Message:
        """The answer to a request, as `KeyTable` or rank 0's server defines it; StoreTimeout after `seconds`."""
        deadline = time.monotonic() + (self.seconds if seconds is None else seconds)
        try:
            try:
                connection = self._free.pop()
            except IndexError:
                left = max(0.1, deadline - time.monotonic())
                connection = connect(self.place, self.key, self.rank, left, LARGEST_ANSWER)
            try:
                connection.socket.settimeout(None)
                connection.send([operation, *arguments], data)
                answer = self._answer(connection, deadline)
            except BaseException:  # its next message would answer another request
                connection.close()
                raise
        except OSError as error:
            raise DistNetworkError(GONE) from error
        self._free.append(connection)
        return answer

    def arrive(self, facts: dict[str, Any], seconds: float) -> Message:
        """Send rank 0's server what this rank was started with, and return its verdict. Raises as `request`.

        If this rank is interrupted meanwhile, it leaves on the same connection, so that it may be restarted.
        """
        connection, deadline = self._free.pop(), time.monotonic() + seconds
        try:
            connection.socket.settimeout(None)
            connection.send(["arrive", facts])
            answer = self._answer(connection, deadline)
        except OSError as error:
            connection.close()
            raise DistNetworkError(GONE) from error
        except BaseException:
            with contextlib.suppress(OSError):
                connection.socket.settimeout(1.0)
                connection.send(["leave"])
            connection.close()
            raise
        self._free.append(connection)
        return answer

    def _answer(self, connection: Connection, deadline: float) -> Message:
        while True:
            try:
                return connection.receive(min(deadline, time.monotonic() + CHECK_SECONDS))
            except TimeoutError:
                self._check()
                if time.monotonic() > deadline:
                    raise StoreTimeout("Timed out") from None

    # The following are a Store's methods, under the names by which torch calls them.

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of `key`."""
        self.request("set", key, data=_bytes(value))

    def get(self, key: str) -> bytes:
        """The value of `key`, once it exists."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of `keys`, once all exist."""
        return self._wait(keys, self.seconds)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of `keys` exist."""
        self._wait(keys, self.seconds if timeout is None else timeout.total_seconds())

    def _wait(self, keys: Sequence[str], seconds: float) -> list[bytes]:
        lengths, data = self.request("wait", list(keys), seconds, seconds=seconds + PATIENCE_SECONDS)
        if lengths is None:
            raise StoreTimeout(f"Timed out after {seconds:g} s waiting for {', '.join(keys)}")
        ends = list(itertools.accumulate(lengths))
        return [data[end - length : end] for length, end in zip(lengths, ends, strict=True)]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set the value of each key."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def append(self, key: str, value: str | bytes) -> None:
        """Append `value` to the value of `key`."""
        self.request("append", key, data=_bytes(value))

    def has_extended_api(self) -> bool:
        """True: append, multi_get and multi_set exist."""
        return True

    def add(self, key: str, amount: int) -> int:
        """Add to the number at `key` (0 if there is none); return the sum."""
        return int(self.request("add", key, amount)[1])

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of `keys` exist."""
        return self.request("check", *keys)[0]

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set `key` to `desired` if its value is `expected`; return its value after that."""
        expected = _bytes(expected)
        return self.request("compare_set", key, len(expected), data=expected + _bytes(desired))[1]

    def delete_key(self, key: str) -> bool:
        """Remove `key`; return whether it existed."""
        return self.request("delete", key)[0]

    def num_keys(self) -> int:
        """The number of keys."""
        return self.request("count")[0]

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 - what torch's C++ looks for

    def clone(self) -> "StoreClient":
        """This same store, which any thread can use."""
        return self


class Rank0Store(StoreClient):
    """The store as rank 0 uses it, with direct access to the `table`, so that it waits for no connection."""

    def __init__(self, table: KeyTable, address: str, seconds: float):
        super().__init__((address, 0), b"", 0, seconds)
        self._table = table

    def request(self, operation: str, *arguments: Any, data: bytes = b"", seconds: float | None = None) -> Message:
        """The table's answer."""
        try:
            return self._table.answer(operation, arguments, data)
        except ConnectionAbortedError as error:
            raise DistNetworkError(GONE) from error


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
