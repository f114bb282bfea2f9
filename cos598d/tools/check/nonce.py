"""A trial's random seed, of which each rank has only its own part: so no rank computes what another one sees."""

import hashlib


class Nonce(int):
    """As a number: the seed of what all ranks share, such as a model. `of(rank)`: the seed of what one rank alone sees.

    The trial's own number, from which both follow, is left out on a rank. A rank's code may read all of its process.
    """

    _seeds: dict[int, int]
    _trial: int | None

    def __new__(cls, trial: int, rank: int | None = None) -> "Nonce":
        """The seeds of a trial: all of them, or those that `rank` may have."""
        self = super().__new__(cls, _drawn(trial, "all"))
        self._trial = trial if rank is None else None
        self._seeds = {} if rank is None else {rank: _drawn(trial, rank)}
        return self

    def of(self, rank: int) -> int:
        """The seed of what `rank` alone sees. Raises KeyError on another rank."""
        return self._seeds[rank] if self._trial is None else _drawn(self._trial, rank)


def seed_of(nonce: int, rank: int) -> int:
    """The seed of what `rank` alone sees; a plain number is the seed of everything."""
    return nonce.of(rank) if isinstance(nonce, Nonce) else nonce


def _drawn(trial: int, part: int | str) -> int:
    return int.from_bytes(hashlib.sha256(f"{trial} {part}".encode()).digest()[:6], "little")
