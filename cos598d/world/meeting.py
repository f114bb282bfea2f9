"""The ranks of one run after the rendezvous: who and where they are, and how they exchange small values."""

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

    `store` serves torch's process group. `hosts[r]` is equal for all ranks of a host. The other ranks reach this one at
    `address`. `secret` is the shared secret, which may be empty. Values are exchanged as JSON. `deadlocks` records what
    this rank waits for.
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
        self._is_served = isinstance(store, StoreClient)  # by rank 0; otherwise by a store of torch's, for a few ranks
        self._exchanges = 0
        self._read = ""  # on rank 0: the key of the last exchange's values

    @property
    def ranks_on_host(self) -> int:
        """How many ranks are on this rank's host, including itself."""
        return self.hosts.count(self.hosts[self.identity.rank])

    @property
    def index_on_host(self) -> int:
        """This rank's index among the ranks of its host, from 0."""
        return self.hosts[: self.identity.rank].count(self.hosts[self.identity.rank])

    def exchange(self, value: Any) -> list[Any]:
        """Give `value` (JSON) to every rank and return every rank's, in order of rank. Every rank must call it.

        Raises UserError with the ranks that did not call it within `seconds`.
        """
        name = self._give(value)
        if not self._is_served:
            return [json.loads(text) for text in self._take(name)]
        if self.identity.rank == 0:
            texts = self._take(name)
            # Equal values of several ranks are sent once: the distinct values, and for each rank the index of its own.
            places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
            self.store.set(f"{name}/all", f"[[{','.join(places)}],{json.dumps([places[text] for text in texts])}]")
            self._read = f"{name}/all"
        values, of_ranks = json.loads(self._get([f"{name}/all"], name)[0])
        return [values[place] for place in of_ranks]

    def collect(self, value: Any) -> list[Any] | None:
        """Give `value` (JSON) to rank 0, which gets every rank's, in order of rank. Other ranks get None at once.

        Every rank must call it. Raises UserError on rank 0 with the ranks that did not.
        """
        name = self._give(value)
        return [json.loads(text) for text in self._take(name)] if self.identity.rank == 0 else None

    def _give(self, value: Any) -> str:
        """Send this rank's value to rank 0. Return the name of the exchange."""
        self._exchanges += 1
        name = f"exchange/{self._exchanges}"
        self.store.set(f"{name}/{self.identity.rank}", json.dumps(value))
        return name

    def _take(self, name: str) -> list[str]:
        """Every rank's value, as JSON."""
        keys = [f"{name}/{rank}" for rank in range(self.identity.world_size)]
        texts = [value.decode() for value in self._get(keys, name)]
        if self._is_served:
            # All ranks have read the last exchange's values, since they have begun this one.
            for key in (*keys, *filter(None, [self._read])):
                self.store.delete_key(key)
            self._read = ""
        return texts

    def _get(self, keys: list[str], name: str) -> list[bytes]:
        """The values of `keys`, in the exchange `name`. Raises UserError if they do not come."""
        try:
            if self._is_served:
                return self.store.multi_get(keys)
            self._poll(keys)
            return [self.store.get(key) for key in keys]
        except StoreTimeout:
            ranks = range(self.identity.world_size)
            missing = [rank for rank in ranks if not self.store.check([f"{name}/{rank}"])] or [0]
            raise UserError(
                f"no answer from {ranks_in_words(missing)} within {self.seconds:g} s. Check whether they run, or "
                "raise --timeout."
            ) from None

    def _poll(self, keys: list[str]) -> None:
        """Wait for keys of a store of torch's, which polls seldom and blocks signals meanwhile."""
        deadline, pause = time.monotonic() + self.seconds, SHORTEST_POLL
        while not self.store.check(keys):
            if time.monotonic() > deadline:
                raise StoreTimeout("Timed out")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL)
