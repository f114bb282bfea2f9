"""The ranks of one run once they have met: who and where they are, and how they exchange small values."""

import json
import time
from collections.abc import Hashable, Sequence
from typing import Any

from torch.distributed import Store

from cos598d.errors import UserError
from cos598d.terminal.words import ranks_in_words
from cos598d.world.deadlock import DeadlockDetector
from cos598d.world.identity import Identity
from cos598d.world.store import StoreClient, StoreTimeout

SHORTEST_POLL, LONGEST_POLL = 0.001, 0.05


class Meeting:
    """The ranks of one run, joined by a key-value store; the result of the rendezvous.

    `store` serves torch's process group, `hosts[r]` is the same for all ranks of a host, the other ranks reach this one
    at `address`, and `secret` is what the ranks share (it may be empty). Values are exchanged as JSON. `deadlocks`
    knows what this rank waits for.
    """

    def __init__(
        self,
        identity: Identity,
        store: Store,
        hosts: Sequence[Hashable],
        seconds: float,
        address: str = "127.0.0.1",
        secret: bytes = b"",
    ):
        self.identity, self.store, self.hosts, self.seconds = identity, store, list(hosts), seconds
        self.address, self.secret = address, secret
        self.deadlocks = DeadlockDetector()
        self._exchanges = 0

    @property
    def ranks_on_host(self) -> int:
        """How many ranks share this rank's host, itself included."""
        return self.hosts.count(self.hosts[self.identity.rank])

    @property
    def index_on_host(self) -> int:
        """This rank's place among the ranks of its host: 0 for the first."""
        return self.hosts[: self.identity.rank].count(self.hosts[self.identity.rank])

    def exchange(self, value: Any) -> list[Any]:
        """Give `value` (JSON) to every rank and return every rank's, in order of rank. Every rank must call it.

        Raises UserError, which names the ranks that did not call it within `seconds`.
        """
        return self._exchange(value, None)

    def collect(self, value: Any) -> list[Any] | None:
        """Give `value` (JSON) to rank 0, which gets every rank's, in order of rank; the others get None, at once.

        Every rank must call it. Raises UserError on rank 0, which names the ranks that did not.
        """
        values = self._exchange(value, 0)
        return values if self.identity.rank == 0 else None

    def _exchange(self, value: Any, root: int | None) -> list[Any]:
        """Every rank's value; nothing where only another rank, the `root`, gets them."""
        self._exchanges += 1
        name = f"exchange/{self._exchanges}"
        if not isinstance(self.store, StoreClient):
            return self._exchange_by_keys(name, value, root)
        try:
            return self.store.exchange(name, value, root) or []
        except StoreTimeout:
            raise self._no_word(self.store.absent(name)) from None

    def _exchange_by_keys(self, name: str, value: Any, root: int | None) -> list[Any]:
        """An exchange through a store that has only keys. The last rank to come sets one key that the others watch."""
        size = self.identity.world_size
        self.store.set(f"{name}/{self.identity.rank}", json.dumps(value))
        if self.store.add(f"{name}/count", 1) == size:
            self.store.set(f"{name}/complete", "")
        if root not in (None, self.identity.rank):
            return []
        deadline, pause = time.monotonic() + self.seconds, SHORTEST_POLL
        while not self.store.check([f"{name}/complete"]):
            if time.monotonic() > deadline:
                raise self._no_word([rank for rank in range(size) if not self.store.check([f"{name}/{rank}"])])
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL)
        return [json.loads(self.store.get(f"{name}/{rank}")) for rank in range(size)]

    def _no_word(self, missing: list[int]) -> UserError:
        return UserError(f"no word from {ranks_in_words(missing)} within {self.seconds:g} s.")
