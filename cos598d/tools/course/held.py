"""What a process holds: bytes of tensors and numbers, and whether a tensor's memory is still in use."""

import gc
import time
from collections.abc import Callable, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

SPARE = 1.25  # parts need not be equal: whole parameters may be dealt out
SECONDS_TO_LET_GO = 1.5


def held_bytes() -> int:
    """Of all tensors that Python has, each memory once, and of lists of numbers."""
    gc.collect()
    storages, numbers = {}, 0
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        elif type(each) is list and each and type(each[0]) is float:
            numbers += 8 * len(each)
    return sum(storages.values()) + numbers


class Watched:
    """Tensors whose memory is watched, whoever has it."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()):
        self._storages: list[tuple[StorageWeakRef, int]] = []
        for tensor in tensors:
            self.note(tensor)

    def note(self, tensor: torch.Tensor) -> None:
        """Watch this one too."""
        self._storages.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))

    def bytes_left(self) -> int:
        """Of those whose memory is still in use."""
        return sum(size for storage, size in self._storages if not storage.expired())


def settled(count: Callable[[], int], most: float) -> int:
    """The first count that is at most `most`, or else the last.

    gloo's threads let go of what they have sent a little after the call that waits for it has returned, on a busy
    machine much later.
    """
    until = time.monotonic() + SECONDS_TO_LET_GO
    while (found := count()) > most and time.monotonic() < until:
        time.sleep(0.05)
    return found
