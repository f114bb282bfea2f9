"""The samples of a rank: what torch's loaders and samplers hand out, and digests of what is trained and evaluated."""

import hashlib
import math
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, Subset
from torch.utils.data.distributed import DistributedSampler

from cos598d.tools.audit.watch.places import ScriptLine, here

_VALUES = 256  # of a row of each input, spread over it: enough to recognize it
_MOST_ROWS = 4096
_MOST = 64  # loaders, and epochs of a sampler, that are noted
MOST = 8192
_COARSE = (torch.bfloat16, torch.float16)  # of so few digits any number is a share of a power of 2
_MOST_SUMS, _MOST_NUMBERS = 64, 8  # calls of an evaluation that add up numbers, and numbers in one


def tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """The tensors in arguments, in order, also within lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part, depth - 1)
    elif depth and isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part, depth - 1)


def has_values(value: Any) -> bool:
    """Whether these tensors have values. torch's fake ones and those on `meta` have only shapes, and train nothing."""
    return not any(tensor.is_meta or hasattr(tensor, "fake_mode") for tensor in tensors_in(value))


def batch_size(inputs: list[torch.Tensor]) -> int:
    """The first dimension of the first input that has one; 0 if none has."""
    return next((len(each) for each in inputs if each.dim()), 0)


def sample_digests(inputs: list[torch.Tensor]) -> list[str]:
    """A digest of 16 letters for each row of the batch, over all inputs that have as many rows."""
    size = batch_size(inputs)
    with torch.no_grad():
        columns = [_rows(each) for each in inputs if each.dim() and len(each) == size]
    found = []
    for row in range(min(size, _MOST_ROWS)):
        digest = hashlib.blake2b(digest_size=8)
        for values in columns:
            digest.update(values[row].tobytes())
        found.append(digest.hexdigest())
    return found


def _rows(tensor: torch.Tensor) -> np.ndarray:
    flat = tensor.detach()
    if flat.layout is not torch.strided:
        flat = flat.to_dense()
    flat = flat.reshape(len(flat), -1)
    if flat.shape[1] > _VALUES:
        flat = flat[:, :: flat.shape[1] // _VALUES]
    if flat.dtype in (torch.bfloat16, torch.float16):
        flat = flat.float()
    return np.ascontiguousarray(flat.cpu().numpy())


class Data:
    """The loaders and samplers of this process, in the order in which they were first iterated over.

    When `backward` reports that a batch was trained on, it came from the loader that gave the last batch and its
    sampler. Without a loader, it came from the sampler that drew last.
    """

    def __init__(self) -> None:
        self.loaders: dict[int, dict[str, Any]] = {}
        self.samplers: dict[int, dict[str, Any]] = {}
        self.begun = 0  # epochs of all of them
        self.batches = 0  # that loaders gave
        self._last: dict[str, dict[str, Any]] = {}
        self._drawn: dict[int, int] = {}  # the epochs that samplers drew and that were not trained on yet
        self._first: dict[int, int] = {}  # of each loader the time that it was first trained on
        self._iterators: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # their loaders
        self._alive: list[Any] = []  # so that no two have the same id

    def backward(self) -> None:
        """A batch has just been trained on."""
        for each in self._last.values():
            each["trains"] = True
            self._first.setdefault(id(each), each["times"])
        sampler = self._last.get("sampler")
        epoch = self._drawn.pop(id(sampler), None)  # what is drawn for a look at a batch is no epoch
        if sampler is not None and epoch is not None and len(sampler["epochs"]) < _MOST:
            sampler["epochs"].append(epoch)

    def is_second_epoch(self) -> bool:
        """Whether a training loader has begun again."""
        return any(each["times"] > self._first.get(id(each), each["times"]) for each in self.loaders.values())

    def drawn(self) -> dict[str, Any]:
        """The source of the last batch: its length, this rank's share, and whether a distributed sampler has cut it.

        The lengths are 0 without a loader and a sampler, and for data that is trained on.
        """
        loader, sampler = self._last.get("loader"), self._last.get("sampler")
        last = sampler or loader
        if last is None or last["trains"] or (loader and loader["trains"]):
            return {"length": 0, "share": 0, "is_cut": False}
        share = last["share"] if last is sampler else last["sampler_length"]
        return {"length": last["dataset_length"], "share": share, "is_cut": last is sampler or last["is_distributed"]}

    def loader_began(self, loader: Any) -> None:
        """An epoch of a loader begins."""
        sampler = _sampler(loader)
        self._began("loader", self.loaders, loader, {
            "sampler": type(sampler).__name__,
            "dataset_length": _length(loader.dataset),
            "sampler_length": _length(sampler),
            "is_distributed": isinstance(sampler, DistributedSampler) or hasattr(sampler, "num_replicas"),
            "is_iterable": isinstance(loader.dataset, IterableDataset),
            "workers": loader.num_workers,
            "subset": _subset(loader.dataset),
        })  # fmt: skip

    def sampler_began(self, sampler: DistributedSampler) -> None:
        """A distributed sampler draws an epoch."""
        self._began("sampler", self.samplers, sampler, {
            "dataset_length": _length(sampler.dataset),
            "share": _length(sampler),
            "shuffles": bool(sampler.shuffle),
            "epochs": [],
            "subset": _subset(sampler.dataset),
            "whole_length": _length(getattr(sampler.dataset, "dataset", sampler.dataset)),
        })  # fmt: skip
        known = self.samplers.get(id(sampler))
        if known is not None:
            self._drawn[id(known)] = int(sampler.epoch)

    def iterates(self, iterator: Any, loader: Any) -> None:
        """`iterator` belongs to `loader`."""
        self._iterators[iterator] = loader

    def batch_came(self, iterator: Any) -> None:
        """A loader has given a batch. A loader that evaluates may have begun in between."""
        self.batches += 1
        loader = self._iterators.get(iterator)
        for kind, known, what in (("loader", self.loaders, loader), ("sampler", self.samplers, _sampler(loader))):
            if what is not None and id(what) in known:
                self._last[kind] = known[id(what)]

    def _began(self, kind: str, known: dict[int, dict[str, Any]], what: Any, facts: dict[str, Any]) -> None:
        if id(what) not in known:
            if len(known) >= _MOST:
                return
            place: ScriptLine = here()
            known[id(what)] = facts | {"times": 0, "trains": False, "where": place}
            self._alive.append(what)
        self.begun += 1
        known[id(what)]["times"] += 1
        self._last[kind] = known[id(what)]
        if kind == "loader":  # which has a sampler of its own: another one's draws are not for it
            self._last.pop("sampler", None)


def _sampler(loader: Any) -> Any:
    return getattr(loader, "sampler", None)


def _subset(dataset: Any) -> str:
    """A digest of the places that a Subset has in its data set; "" for any other data set."""
    if not isinstance(dataset, Subset):
        return ""
    places = np.asarray(dataset.indices, dtype=np.int64)
    return hashlib.blake2b(places.tobytes(), digest_size=8).hexdigest()


def _length(what: Any) -> int:
    """Its length; 0 if it has none."""
    try:
        return len(what)
    except (TypeError, NotImplementedError):
        return 0


class Samples:
    """Digests of samples, in order: those of training until an epoch is over or MOST have been seen."""

    def __init__(self) -> None:
        self.training: list[str] = []
        self.evaluation: list[str] = []
        self.evaluation_batches = 0  # in all
        self.sums: list[dict[str, Any]] = []  # numbers that the last evaluation adds up over the ranks
        self._rows = self._begun = 0
        self._seen: set[str] = set()
        self._is_over = False

    def trained(self, batch: list[torch.Tensor], epoch_is_over: bool) -> None:
        """A batch that was trained on."""
        if self._is_over or epoch_is_over or len(self.training) >= MOST:
            self._is_over = True
            return
        found = sample_digests(batch)
        if found and self._seen.issuperset(found) and len(self._seen) > len(found):
            self._is_over = True  # a loop without a loader has started again
            return
        self._seen.update(found)
        self.training += found[: MOST - len(self.training)]

    def evaluation_begins(self) -> None:
        """A new evaluation begins. Only the last one is compared."""
        self.evaluation, self.evaluation_batches = [], 0
        self.sums, self._rows = [], 0

    def evaluate(self, batch: list[torch.Tensor], begun: int) -> None:
        """A batch went through the model without gradients. `begun` epochs of loaders and samplers have begun."""
        self._rows = batch_size(batch) + (self._rows if begun == self._begun else 0)
        self._begun = begun
        self.evaluation_batches += 1
        if len(self.evaluation) < MOST:
            self.evaluation += sample_digests(batch)[: MOST - len(self.evaluation)]

    def adds_up(self, tensors: list[torch.Tensor], drawn: dict[str, Any], where: ScriptLine) -> None:
        """An evaluation is about to sum these tensors over the ranks. `drawn` describes its loader or sampler."""
        elements = sum(each.numel() for each in tensors)
        are_exact = all(each.layout is torch.strided and each.dtype not in _COARSE for each in tensors)
        if self._rows and len(self.sums) < _MOST_SUMS and 0 < elements <= _MOST_NUMBERS and are_exact:
            values = [value for each in tensors for value in each.detach().double().flatten().tolist()]
            if all(map(math.isfinite, values)):
                self.sums.append({"values": values, "rows": self._rows, "where": where} | drawn)
