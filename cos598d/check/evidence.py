"""What a rank hands to the grader: tensors and facts, never a verdict. It is read as what a stranger has sent."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

Tensors = Mapping[str, torch.Tensor | None]


class BadEvidence(Exception):
    """What a rank handed in is not what was asked for; the message says what of it, and names no rank."""


class Evidence:
    """Tensors by (claim, moment, name) and facts by (claim, name), with the nonce of the trial that they belong to.

    The nonce seeds the trial's models and data, so that the right values cannot be known before.
    """

    def __init__(self, rank: int, nonce: int):
        self.rank, self.nonce = rank, nonce
        self._tensors: dict[str, torch.Tensor] = {}
        self._nothing: list[str] = []  # names under which there was no tensor, as a .grad that is None
        self._facts: dict[str, Any] = {}

    def put(self, claim: str, moment: str, tensors: Tensors) -> None:
        """Keep copies of the tensors as they are now."""
        for name, tensor in tensors.items():
            key = f"{claim}/{moment}/{name}"
            if tensor is None:
                self._nothing.append(key)
            else:
                self._tensors[key] = tensor.detach().clone().contiguous()

    def say(self, claim: str, name: str, value: Any) -> None:
        """Keep a fact (JSON)."""
        self._facts[f"{claim}/{name}"] = value

    def to_bytes(self) -> bytes:
        """As a file of safetensors."""
        about = {"nonce": self.nonce, "rank": self.rank, "nothing": self._nothing, "facts": self._facts}
        return save(self._tensors, metadata={"about": json.dumps(about)})

    @classmethod
    def from_bytes(cls, data: bytes, rank: int, nonce: int) -> "Evidence":
        """Raises BadEvidence for what `to_bytes` did not write for this rank and nonce."""
        if not data:
            raise BadEvidence("handed in nothing")
        try:
            tensors = load(data)
            length = int.from_bytes(data[:8], "little")
            about = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["about"])
            found = [about["nonce"], about["rank"]]
            nothing, facts = about["nothing"], about["facts"]
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError):
            raise BadEvidence("handed in what is no evidence") from None
        if found != [nonce, rank] or not isinstance(nothing, list) or not isinstance(facts, dict):
            raise BadEvidence("handed in the evidence of another trial")
        self = cls(rank, nonce)
        self._tensors, self._facts = tensors, facts
        self._nothing = [key for key in nothing if isinstance(key, str)]
        return self

    def get(self, claim: str, moment: str, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
        """The tensors of that moment under the names of `like`, each None or of its namesake's shape and dtype."""
        found: dict[str, torch.Tensor | None] = {}
        nothing = set(self._nothing)
        for name, pattern in like.items():
            key = f"{claim}/{moment}/{name}"
            tensor = self._tensors.get(key)
            if tensor is None and key not in nothing:
                raise BadEvidence(f"did not hand in {name} ({moment})")
            if tensor is not None and (tensor.shape, tensor.dtype) != (pattern.shape, pattern.dtype):
                raise BadEvidence(f"handed in {name} as {_kind(tensor)} where {_kind(pattern)} belongs ({moment})")
            found[name] = tensor
        return found

    def fact(self, claim: str, name: str, kinds: type | tuple[type, ...]) -> Any:
        """The fact, of one of these types."""
        value = self._facts.get(f"{claim}/{name}")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in _each(kinds)):
            raise BadEvidence(f"did not say {name}")
        return value


def _kind(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype)[6:]}"


def _each(kinds: type | tuple[type, ...]) -> Iterable[type]:
    return kinds if isinstance(kinds, tuple) else (kinds,)
