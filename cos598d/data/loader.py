"""A training's batches; those of images are prepared by a thread while the model computes earlier ones."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from cos598d.data.examples import Draw, Examples
from cos598d.data.sampler import MicroBatch

if TYPE_CHECKING:
    import torch

AHEAD = 2  # global batches that are prepared in advance


class Ready:
    """One rank's micro-batches of a global batch, and the model's inputs of each."""

    def __init__(self, features: Examples, micro_batches: Sequence[MicroBatch], draw: Draw):
        self.micro_batches = list(micro_batches)
        self._features, self._draw = features, draw
        self._inputs: dict[int, dict[str, torch.Tensor]] = {}

    def prepare(self) -> "Ready":
        """Make all inputs now, in the calling thread."""
        self._inputs = {id(one): self._collate(one) for one in self.micro_batches}
        return self

    def inputs(self, micro_batch: MicroBatch) -> dict[str, "torch.Tensor"]:
        """The inputs of one of the micro-batches, on the CPU."""
        made = self._inputs.pop(id(micro_batch), None)
        return self._collate(micro_batch) if made is None else made

    def _collate(self, micro_batch: MicroBatch) -> dict[str, "torch.Tensor"]:
        return self._features.collate(micro_batch.indices, self._draw)


def load_batches(
    features: Examples,
    batches: Iterable[tuple[int, np.ndarray]],
    split: Callable[[np.ndarray], Sequence[MicroBatch]],
    seed: int,
) -> Iterator[tuple[int, np.ndarray, Callable[[], Ready]]]:
    """Yield each epoch's number and global batch, and a function that waits for this rank's part, as cut by `split`.

    Random changes depend on `seed` and the epoch. Slow examples are prepared by a thread, up to AHEAD batches in
    advance. Its errors are raised where the batch is waited for.
    """

    def ready(epoch: int, batch: np.ndarray) -> Ready:
        return Ready(features, split(batch), (seed, epoch))

    def prepared(epoch: int, batch: np.ndarray) -> Ready:
        return ready(epoch, batch).prepare()

    if not features.is_slow:
        for epoch, batch in batches:
            yield epoch, batch, partial(ready, epoch, batch)
        return
    waiting: deque[tuple[int, np.ndarray, Future[Ready]]] = deque()
    with ThreadPoolExecutor(1, "batches") as pool:
        for epoch, batch in batches:
            waiting.append((epoch, batch, pool.submit(prepared, epoch, batch)))
            if len(waiting) > AHEAD:
                first, its_batch, made = waiting.popleft()
                yield first, its_batch, made.result
        for first, its_batch, made in waiting:
            yield first, its_batch, made.result
