"""A rank's end of what rank 0 serves: a key-value store for torch's process group, and exchanges of small values."""

import contextlib
import itertools
import json
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, Store

from cos598d.world.channel import Frames, Stranger, connect

LARGEST_ANSWER = 1 << 31
_READ_BYTES = 1 << 18
_SLICE_SECONDS = 1.0  # how often somebody who waits looks whether it still should
# With these words `be_rank` waits for the news of who is lost.
GONE = "Connection closed: rank 0, which serves the meeting point, is gone"


class NotInTime(DistStoreError):
    """What was waited for did not come in time."""


class RankStore(Store):
    """The store at `place`, which lets in whoever knows `key`, as `rank` uses it; a torch.distributed.Store.

    Threads may use it at once: who finds no connection free opens another. Waiting takes `seconds` at most, and is left
    for `still`, which may raise, every second. Raises DistNetworkError when rank 0 is gone, NotInTime for what does not
    come.
    """

    def __init__(
        self, place: tuple[str, int], key: bytes, rank: int, seconds: float, still: Callable[[], None] = lambda: None
    ):
        super().__init__()
        self.place, self.key, self.rank, self.seconds, self._still = place, key, rank, seconds, still
        self._numbers = itertools.count()
        # Taken and put back by any thread: a list's steps are atomic. Threads of C++ keep nothing here.
        self._free: list[tuple[socket.socket, Frames]] = []
        self.local_address = place[0]  # by which this rank reaches rank 0; known once a connection is open

    def open(self, seconds: float) -> None:
        """Connect. Raises what `channel.connect` does."""
        line, frames = connect(self.place, self.key, self.rank, seconds, LARGEST_ANSWER)
        self.local_address = line.getsockname()[0]
        self._free.append((line, frames))

    def use(self, line: socket.socket, frames: Frames) -> None:
        """Use a connection that is open already."""
        frames.largest = LARGEST_ANSWER
        self._free.append((line, frames))

    def request(self, operation: str, *arguments: Any, seconds: float | None = None) -> Any:
        """The answer to a request, as `server.Server` says; NotInTime after `seconds`."""
        deadline = time.monotonic() + (self.seconds if seconds is None else seconds)
        number = next(self._numbers)
        payload = json.dumps([number, operation, *arguments]).encode()
        try:
            line, frames = self._connection()
            try:
                line.settimeout(None)
                line.sendall(frames.pack(payload))
                return self._answer(line, frames, number, deadline)
            finally:
                self._free.append((line, frames))
        except OSError as error:
            raise DistNetworkError(GONE) from error

    def _connection(self) -> tuple[socket.socket, Frames]:
        with contextlib.suppress(IndexError):
            return self._free.pop()
        return connect(self.place, self.key, self.rank, self.seconds, LARGEST_ANSWER)

    def _answer(self, line: socket.socket, frames: Frames, number: int, deadline: float) -> Any:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise NotInTime("Timed out")
            line.settimeout(min(left, _SLICE_SECONDS))
            try:
                data = line.recv(_READ_BYTES)
            except TimeoutError:
                self._still()
                continue
            if not data:
                raise Stranger("gone")
            for its_number, value in frames.unpack(data):
                if its_number == number:  # else to what was given up
                    return value

    def exchange(self, name: str, value: Any, root: int | None = None) -> list[Any] | None:
        """Give `value` (JSON) to the exchange `name`; every rank's, in order of rank (at `root` alone, if given)."""
        return self.request("exchange", name, value, root)

    def absent(self, name: str) -> list[int]:
        """The ranks that have given nothing to the exchange `name`."""
        return self.request("absent", name)

    # What follows are a Store's methods, under the names that torch calls them by.

    def set(self, key: str, value: str | bytes) -> None:
        """Put `value` under `key`."""
        self.request("set", key, _text(value))

    def get(self, key: str) -> bytes:
        """The value of `key`, waiting for it."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of `keys`, waiting for them."""
        try:
            return [value.encode("latin-1") for value in self.request("wait", list(keys))]
        except NotInTime:
            raise NotInTime(f"Timed out after {self.seconds:g} s waiting for {', '.join(keys)}") from None

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Put each of `values` under its key."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def append(self, key: str, value: str | bytes) -> None:
        """Put `value` after what is under `key`."""
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

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of `keys` are there."""
        seconds = self.seconds if timeout is None else timeout.total_seconds()
        try:
            self.request("wait", list(keys), seconds=seconds)
        except NotInTime:
            raise NotInTime(f"Timed out after {seconds:g} s waiting for {', '.join(keys)}") from None

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Put `desired` under `key` if `expected` is there; return what is there then."""
        return self.request("compare_set", key, _text(expected), _text(desired)).encode("latin-1")

    def delete_key(self, key: str) -> bool:
        """Remove `key`; whether it was there."""
        return self.request("delete", key)

    def num_keys(self) -> int:
        """How many keys there are."""
        return self.request("count")

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 - what torch's C++ looks for

    def clone(self) -> "RankStore":
        """This store, which any thread can use."""
        return self


def _text(value: str | bytes) -> str:
    return (value.encode() if isinstance(value, str) else value).decode("latin-1")
