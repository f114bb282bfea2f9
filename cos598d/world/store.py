"""A rank's client of rank 0's server: a key-value store for torch's process group, and exchanges of small values."""

import contextlib
import itertools
import json
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, Store

from cos598d.world.channel import READ_BYTES, Frames, ProtocolError, from_text, to_text
from cos598d.world.handshake import connect

LARGEST_ANSWER = 1 << 31
CHECK_SECONDS = 1.0  # how often whoever waits checks that it still should
# These words let `rank` wait for the news of who is lost.
GONE = "Connection closed: rank 0, which serves the meeting point, is gone"


class StoreTimeout(DistStoreError):
    """What was waited for did not come in time."""


class StoreClient(Store):
    """The store at `place`, which admits those who know `key`, as `rank` uses it; a torch.distributed.Store.

    Several threads may use it at once: one that finds no free connection opens another. A request waits `seconds` at
    most, and calls `check`, which may raise, every second. Raises DistNetworkError when rank 0 is gone, StoreTimeout
    for what does not come.
    """

    def __init__(
        self, place: tuple[str, int], key: bytes, rank: int, seconds: float, check: Callable[[], None] = lambda: None
    ):
        super().__init__()
        self.place, self.key, self.rank, self.seconds, self._check = place, key, rank, seconds, check
        self._numbers = itertools.count()
        # Any thread takes from it and puts back: a list's steps are atomic. A thread of torch's keeps no thread-locals.
        self._free: list[tuple[socket.socket, Frames]] = []
        self.local_address = place[0]  # from which this rank reaches rank 0; known once a connection is open

    def open(self, seconds: float) -> None:
        """Connect. Raises what `handshake.connect` does."""
        connection, frames = connect(self.place, self.key, self.rank, seconds, LARGEST_ANSWER)
        self.local_address = connection.getsockname()[0]
        self._free.append((connection, frames))

    def use(self, connection: socket.socket, frames: Frames) -> None:
        """Use a connection that is open already."""
        frames.largest = LARGEST_ANSWER
        self._free.append((connection, frames))

    def request(self, operation: str, *arguments: Any, seconds: float | None = None) -> Any:
        """The answer to a request, as `server.StoreServer` defines them; StoreTimeout after `seconds`."""
        deadline = time.monotonic() + (self.seconds if seconds is None else seconds)
        number = next(self._numbers)
        payload = json.dumps([number, operation, *arguments]).encode()
        try:
            connection, frames = self._connection()
            try:
                connection.settimeout(None)
                connection.sendall(frames.pack(payload))
                return self._answer(connection, frames, number, deadline)
            finally:
                self._free.append((connection, frames))
        except OSError as error:
            raise DistNetworkError(GONE) from error

    def _connection(self) -> tuple[socket.socket, Frames]:
        with contextlib.suppress(IndexError):
            return self._free.pop()
        return connect(self.place, self.key, self.rank, self.seconds, LARGEST_ANSWER)

    def _answer(self, connection: socket.socket, frames: Frames, number: int, deadline: float) -> Any:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise StoreTimeout("Timed out")
            connection.settimeout(min(left, CHECK_SECONDS))
            try:
                data = connection.recv(READ_BYTES)
            except TimeoutError:
                self._check()
                continue
            if not data:
                raise ProtocolError("gone")
            for its_number, value in frames.unpack(data):
                if its_number == number:  # others answer requests that were given up
                    return value

    def exchange(self, name: str, value: Any, root: int | None = None) -> list[Any] | None:
        """Give `value` (JSON) to the exchange `name`; return every rank's in order of rank (at `root` alone, if given).

        Other ranks than `root` get None at once. What several ranks say alike is one object.
        """
        answer = self.request("exchange", name, value, root)
        if answer is None:
            return None
        values, of_ranks = answer
        return [values[place] for place in of_ranks]

    def absent(self, name: str) -> list[int]:
        """The ranks that have given nothing to the exchange `name`."""
        return self.request("absent", name)

    # What follows are a Store's methods, under the names by which torch calls them.

    def set(self, key: str, value: str | bytes) -> None:
        """Put `value` under `key`."""
        self.request("set", key, _text(value))

    def get(self, key: str) -> bytes:
        """The value of `key`, once there is one."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of `keys`, once all are there."""
        return [from_text(value) for value in self._wait(keys, self.seconds)]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of `keys` are there."""
        self._wait(keys, self.seconds if timeout is None else timeout.total_seconds())

    def _wait(self, keys: Sequence[str], seconds: float) -> list[str]:
        try:
            return self.request("wait", list(keys), seconds=seconds)
        except StoreTimeout:
            raise StoreTimeout(f"Timed out after {seconds:g} s waiting for {', '.join(keys)}") from None

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Put each of `values` under its key."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def append(self, key: str, value: str | bytes) -> None:
        """Add `value` to the end of what is under `key`."""
        self.request("append", key, _text(value))

    def has_extended_api(self) -> bool:
        """Whether there are append, multi_get and multi_set."""
        return True

    def add(self, key: str, amount: int) -> int:
        """Add to the number under `key`, 0 if there is none; return the sum."""
        return self.request("add", key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of `keys` are there."""
        return self.request("check", list(keys))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Put `desired` under `key` if `expected` is there; return what is there then."""
        return from_text(self.request("compare_set", key, _text(expected), _text(desired)))

    def delete_key(self, key: str) -> bool:
        """Remove `key`; return whether it was there."""
        return self.request("delete", key)

    def num_keys(self) -> int:
        """How many keys there are."""
        return self.request("count")

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 - what torch's C++ looks for

    def clone(self) -> "StoreClient":
        """This same store, which any thread can use."""
        return self


def _text(value: str | bytes) -> str:
    return to_text(value.encode() if isinstance(value, str) else value)
