"""What a rank hands to the grader: tensors and values, never a verdict. The grader treats it as untrusted."""

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from cos598d.tools.check.spawn import HANDED_IN

Tensors = Mapping[str, torch.Tensor | None]


class BadEvidence(Exception):
    """What a rank handed in is not what was asked for; the message names the rank."""


class Evidence:
    """Tensors by (claim, moment, name) and JSON values by (claim, name), with their trial's nonce.

    The nonce seeds the trial's models and data, so that the right values cannot be known before.
    """

    def __init__(self, rank: int, nonce: int):
        self.rank, self.nonce = rank, nonce
        self._tensors: dict[str, torch.Tensor] = {}
        self._nothing: list[str] = []  # names without a tensor, such as a .grad that is None
        self._values: dict[str, Any] = {}

    def put(self, claim: str, moment: str, tensors: Tensors) -> None:
        """Keep copies of the tensors' current values."""
        for name, tensor in tensors.items():
            key = f"{claim}/{moment}/{name}"
            if tensor is None:
                self._nothing.append(key)
            else:
                self._tensors[key] = tensor.detach().clone().contiguous()

    def report(self, claim: str, name: str, value: Any) -> None:
        """Keep a value (JSON)."""
        self._values[f"{claim}/{name}"] = value

    def to_bytes(self) -> bytes:
        """As a file of safetensors."""
        about = {"nonce": self.nonce, "rank": self.rank, "nothing": self._nothing, "values": self._values}
        return save(self._tensors, metadata={"about": json.dumps(about)})

    def hand_in(self) -> None:
        """Put everything so far where the supervisor finds it, completely or not at all."""
        place = Path(tempfile.gettempdir()) / f"{HANDED_IN}{self.rank}"
        beside = place.with_suffix(".part")
        beside.write_bytes(self.to_bytes())
        beside.rename(place)

    @classmethod
    def from_bytes(cls, data: bytes, rank: int, nonce: int) -> "Evidence":
        """Raises BadEvidence unless `to_bytes` wrote it for this rank and nonce."""
        if not data:
            raise BadEvidence(f"rank {rank} handed in nothing")
        try:
            tensors = load(data)
            length = int.from_bytes(data[:8], "little")
            about = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["about"])
            found = [about["nonce"], about["rank"]]
            nothing, values = about["nothing"], about["values"]
        except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RuntimeError):
            raise BadEvidence(f"rank {rank} handed in something that cannot be read as evidence") from None
        if found != [nonce, rank] or not isinstance(nothing, list) or not isinstance(values, dict):
            raise BadEvidence(f"rank {rank} handed in the evidence of another trial")
        self = cls(rank, nonce)
        self._tensors, self._values = tensors, values
        self._nothing = [key for key in nothing if isinstance(key, str)]
        return self

    def get(self, claim: str, moment: str, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
        """The tensors of that moment under the names of `like`, each None or with its namesake's shape and dtype."""
        found: dict[str, torch.Tensor | None] = {}
        nothing = set(self._nothing)
        for name, pattern in like.items():
            key = f"{claim}/{moment}/{name}"
            tensor = self._tensors.get(key)
            if tensor is None and key not in nothing:
                raise BadEvidence(f"rank {self.rank} did not hand in {name} ({moment})")
            if tensor is not None and (tensor.shape, tensor.dtype) != (pattern.shape, pattern.dtype):
                raise BadEvidence(
                    f"rank {self.rank} handed in {name} as {_kind(tensor)} where {_kind(pattern)} belongs ({moment})"
                )
            found[name] = tensor
        return found

    def reported(self, claim: str, name: str, kind: type) -> Any:
        """The value, of that type."""
        value = self._values.get(f"{claim}/{name}")
        if type(value) is not kind:  # not isinstance: True is an int there
            raise BadEvidence(f"rank {self.rank} did not report {name}")
        return value


def _kind(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype)[6:]}"


class Nonce(int):
    """As a number, the seed of what all ranks share, such as a model. `of(rank)`: the seed of one rank's own data.

    On a rank, the trial's own number, from which both follow, is left out: a rank's code may read all of its process.
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
        """The seed of the data of `rank` only. Raises KeyError on another rank."""
        return self._seeds[rank] if self._trial is None else _drawn(self._trial, rank)


def seed_of(nonce: int, rank: int) -> int:
    """The seed of the data of `rank` only; a plain number is the seed of everything."""
    return nonce.of(rank) if isinstance(nonce, Nonce) else nonce


def _drawn(trial: int, part: int | str) -> int:
    return int.from_bytes(hashlib.sha256(f"{trial} {part}".encode()).digest()[:6], "little")
