"""The ranks of one run after they met: who and where they are, and how they exchange small values."""

import contextlib
import json
import math
import time
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from cos598d.errors import UserError
from cos598d.terminal.words import ranks_in_words
from cos598d.world.identity import Identity
from cos598d.world.waiting import wait

ANSWER_SECONDS = 3.0  # how long the store of a rank 0 that runs may take to answer, on a busy machine


class Meeting:
    """The ranks of one run, joined by a store.

    `hosts[r]` is equal for all ranks of a host. `store` also serves torch's process group. Collectives may take
    `seconds`. `waits_for` is a phrase for what this rank waits for now, for the error if it never comes. `deadline` is
    when the store must have answered, if it is asked now: the store of a stopped rank 0 never does, and torch would
    wait forever. The lifeline looks at it.
    """

    def __init__(self, identity: Identity, store: dist.Store, hosts: Sequence[Hashable], seconds: float):
        self.identity, self.store, self.hosts, self.seconds = identity, store, list(hosts), seconds
        self.waits_for = ""
        self.deadline = math.inf  # of time.monotonic
        self._exchanges = 0
        self._given: list[str] = []  # the keys of this rank's values that others may still read

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
        with self.asking(self.seconds + ANSWER_SECONDS):
            before, self._given = self._given, []
            keys = self._give(value)
            values = self._take(keys)
            for key in before:  # all have read these, since they have begun this exchange
                self.store.delete_key(key)
            self._given.append(keys[self.identity.rank])
            return values

    def collect(self, value: Any) -> list[Any] | None:
        """Give `value` (JSON) to rank 0, which gets every rank's, in order of rank. Other ranks get None at once.

        Every rank must call it. Raises UserError on rank 0 with the ranks that did not.
        """
        with self.asking(self.seconds + ANSWER_SECONDS):
            keys = self._give(value)
            if self.identity.rank != 0:
                return None
            values = self._take(keys)
            for key in keys:
                self.store.delete_key(key)
            return values

    @contextlib.contextmanager
    def asking(self, seconds: float) -> Iterator[None]:
        """Within the block the store is asked, which may take `seconds`."""
        self.deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            self.deadline = math.inf

    def _give(self, value: Any) -> list[str]:
        """Put this rank's value into the store. Return the keys of all ranks' values."""
        self._exchanges += 1
        keys = [f"exchange/{self._exchanges}/{rank}" for rank in range(self.identity.world_size)]
        self.store.set(keys[self.identity.rank], json.dumps(value))
        return keys

    def _take(self, keys: list[str]) -> list[Any]:
        if not wait(lambda: self.store.check(keys), self.seconds):
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            raise UserError(
                f"{ranks_in_words(missing)} did not answer within {self.seconds:g} s (stopped, or stuck?). Look there, "
                "or raise --timeout."
            )
        return [json.loads(self.store.get(key)) for key in keys]
