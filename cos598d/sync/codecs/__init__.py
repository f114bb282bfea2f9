"""Gradient compression: codecs, by name, that send a bucket in fewer bytes."""

import importlib
from collections.abc import Sequence
from typing import NamedTuple

from cos598d.comm.communicator import Communicator
from cos598d.errors import UsageError
from cos598d.sync.codecs.base import AllReduce, AsTheyAre, Codec
from cos598d.sync.cost import Collective, CollectiveCall

# name on the command line -> module and class
CODECS = {
    "bf16": "cos598d.sync.codecs.half:BFloat16",
    "fp16": "cos598d.sync.codecs.half:Float16",
    "int8": "cos598d.sync.codecs.int8:Int8",
    "topk": "cos598d.sync.codecs.topk:TopK",
    "powersgd": "cos598d.sync.codecs.powersgd:PowerSGD",
}


def get_codec(word: str) -> tuple[type[Codec], float]:
    """The class of a codec, and its number: from `word` ("topk:0.05" sends 5 percent), or its default.

    Raises UsageError for an unknown codec, and for a number that is not valid for it.
    """
    name, _, number = word.partition(":")
    if name not in CODECS:
        raise UsageError(f"--compress {word}: unknown compression. Choose from {', '.join(CODECS)}.")
    module, class_name = CODECS[name].split(":")
    codec = getattr(importlib.import_module(module), class_name)
    if not number:
        return codec, codec.default
    try:
        value = float(number)
    except ValueError:
        value = float("nan")
    if codec.number_words is None:
        raise UsageError(f"--compress {word}: {name} takes no number. Leave the number out.")
    if not codec.takes(value):
        raise UsageError(f"--compress {word}: the number of {name} is not valid. Give {codec.number_words}.")
    return codec, value


def make_codec(
    word: str | None, comm: Communicator, all_reduce: AllReduce, members: Sequence[int] | None = None
) -> Codec:
    """The codec that `word` names, for one sync whose buckets are sent among the ranks `members`, by default all.

    It does nothing if `word` is None, if there is one rank, or on a rank that is not a member.
    """
    members = range(comm.world_size) if members is None else members
    if word is None or len(members) < 2 or comm.rank not in members:
        return AsTheyAre(comm, all_reduce)
    codec, number = get_codec(word)
    return codec(comm, all_reduce, number, members)


class Payload(NamedTuple):
    """One call that a codec makes: its collective, the number of elements, and the bytes per element."""

    collective: Collective
    elements: int
    element_bytes: int

    @property
    def bytes(self) -> int:
        """The bytes of all elements."""
        return self.elements * self.element_bytes

    def moved(self, ranks: int, rank: int) -> tuple[int, int]:
        """The exact bytes that the `rank`-th of `ranks` sends and receives."""
        return self.collective.moved(self.bytes, self.element_bytes, ranks, rank)


def in_code(travel: CollectiveCall, word: str, ranks: int) -> list[Payload]:
    """The calls that the codec `word` makes of a sync's call, among more than one rank."""
    codec, number = get_codec(word)
    collective = codec.collective or travel.collective
    return [Payload(collective, *payload) for payload in codec.payloads(travel.travelling, ranks, number)]
