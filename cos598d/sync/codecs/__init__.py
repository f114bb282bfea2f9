"""Payload codecs: smaller forms in which a bucket's gradients travel, by name."""

import importlib

from cos598d.comm.communicator import Communicator
from cos598d.errors import UsageError
from cos598d.sync.codecs.base import AllReduce, Codec
from cos598d.sync.codecs.none import AsTheyAre

# name on the command line -> module and class
CODECS = {
    "bf16": "cos598d.sync.codecs.half:BFloat16",
    "fp16": "cos598d.sync.codecs.half:Float16",
    "int8": "cos598d.sync.codecs.int8:Int8",
    "topk": "cos598d.sync.codecs.topk:TopK",
    "powersgd": "cos598d.sync.codecs.powersgd:PowerSGD",
}


def get_codec(word: str) -> tuple[type[Codec], float | None]:
    """The class of a codec, and the number that `word` sets for it: "topk:0.05" keeps 5 percent; None: its own.

    Raises UsageError for an unknown codec, and for a number that it cannot have.
    """
    name, _, number = word.partition(":")
    if name not in CODECS:
        raise UsageError(f"--compress {word}: no such codec; the known ones are {', '.join(CODECS)}.")
    module, class_name = CODECS[name].split(":")
    codec = getattr(importlib.import_module(module), class_name)
    if not number:
        return codec, None
    try:
        value = float(number)
    except ValueError:
        value = float("nan")
    if codec.number_words is None:
        raise UsageError(f"--compress {word}: {name} takes no number.")
    if not codec.takes(value):
        raise UsageError(f"--compress {word}: {name} takes {codec.number_words}.")
    return codec, value


def make_codec(word: str | None, comm: Communicator, all_reduce: AllReduce) -> Codec:
    """The codec that `word` names, for one sync; none that changes anything without a word, or for a rank alone."""
    if word is None or comm.world_size == 1:
        return AsTheyAre(comm, all_reduce)
    codec, number = get_codec(word)
    return codec(comm, all_reduce, number)
