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
    `seconds`. `deadline` is when the store must have answered, if it is asked now: the store of a stopped rank 0 never
    does, and torch would wait forever. The lifeline looks at it.
    """

    def __init__(self, identity: Identity, store: dist.Store, hosts: Sequence[Hashable], seconds: float):
        self.identity, self.store, self.hosts, self.seconds = identity, store, list(hosts), seconds
        self.deadline = math.inf  # of time.monotonic
        self._shared = 0

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
        with self.asking(self.seconds):
            return self._take(self._give(value))

    def collect(self, value: Any) -> list[Any] | None:
        """Give `value` (JSON) to rank 0, which gets every rank's, in order of rank. Other ranks get None at once.

        Every rank must call it. Raises UserError on rank 0 with the ranks that did not.
        """
        with self.asking(self.seconds):
            keys = self._give(value)
            return self._take(keys) if self.identity.rank == 0 else None

    @contextlib.contextmanager
    def asking(self, seconds: float = 0.0) -> Iterator[None]:
        """Within the block the store is asked, which may take `seconds` if all ranks run."""
        self.deadline = time.monotonic() + seconds + ANSWER_SECONDS
        try:
            yield
        finally:
            self.deadline = math.inf

    def _give(self, value: Any) -> list[str]:
        """Put this rank's value into the store. Return the keys of all ranks' values."""
        self._shared += 1
        keys = self._keys(self._shared)
        self.store.set(keys[self.identity.rank], json.dumps(value))
        return keys

    def _take(self, keys: list[str]) -> list[Any]:
        if not wait(lambda: self.store.check(keys), self.seconds):
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            raise UserError(
                f"{ranks_in_words(missing)} did not answer within {self.seconds:g} s (stopped, or stuck?). Look there, "
                "or raise --timeout."
            )
        values = [json.loads(text) for text in self.store.multi_get(keys)]
        if self.identity.rank == 0:
            for key in self._keys(self._shared - 1):  # all have read those, since they have begun this exchange
                self.store.delete_key(key)
        return values

    def _keys(self, number: int) -> list[str]:
        return [f"exchange/{number}/{rank}" for rank in range(self.identity.world_size)]
