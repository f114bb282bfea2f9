"""Who hands out the samples: torch's loaders and distributed samplers, what each goes through, and its epochs."""

import weakref
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from cos598d.tools.audit.watch.places import ScriptLine, here

_MOST = 64  # loaders, and epochs of a sampler, that are noted


class Data:
    """The loaders and samplers of this process, by the order in which they were first iterated over.

    `backward` says that a batch was trained on: the loader that gave the last one had it, and its sampler; without a
    loader the sampler that drew last.
    """

    def __init__(self) -> None:
        self.loaders: dict[int, dict[str, Any]] = {}
        self.samplers: dict[int, dict[str, Any]] = {}
        self.seconds = 0.0
        self.begun = 0  # epochs of all of them
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
        """Whether a loader that is trained on has begun again."""
        return any(each["times"] > self._first.get(id(each), each["times"]) for each in self.loaders.values())

    def drawn(self) -> dict[str, Any]:
        """How long the data is that gave the last batch, how long this rank's share, and whether a sampler for several
        ranks has cut it; of data without a loader or a sampler, or that is trained on, the lengths are 0."""
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
        })  # fmt: skip

    def sampler_began(self, sampler: DistributedSampler) -> None:
        """A distributed sampler draws an epoch."""
        self._began("sampler", self.samplers, sampler, {
            "dataset_length": _length(sampler.dataset),
            "total_length": int(sampler.total_size),
            "share": _length(sampler),
            "shuffles": bool(sampler.shuffle),
            "epochs": [],
        })  # fmt: skip
        known = self.samplers.get(id(sampler))
        if known is not None:
            self._drawn[id(known)] = int(sampler.epoch)

    def iterates(self, iterator: Any, loader: Any) -> None:
        """The iterator is the loader's."""
        self._iterators[iterator] = loader

    def batch_came(self, iterator: Any, seconds: float) -> None:
        """A loader has given a batch after so many seconds: one that evaluates between may have begun after it."""
        self.seconds += seconds
        loader = self._iterators.get(iterator)
        for kind, known, what in (("loader", self.loaders, loader), ("sampler", self.samplers, _sampler(loader))):
            if what is not None and id(what) in known:
                self._last[kind] = known[id(what)]

    def _began(self, kind: str, known: dict[int, dict[str, Any]], what: Any, facts: dict[str, Any]) -> None:
        if id(what) not in known:
            if len(known) >= _MOST:
                return
            place: ScriptLine = here()
            known[id(what)] = facts | {"times": 0, "trains": False, "where": [*place]}
            self._alive.append(what)
        self.begun += 1
        known[id(what)]["times"] += 1
        self._last[kind] = known[id(what)]
        if kind == "loader":  # which has a sampler of its own: another one's draws are not for it
            self._last.pop("sampler", None)


def _sampler(loader: Any) -> Any:
    return getattr(loader, "sampler", None)


def _length(what: Any) -> int:
    """Its length; 0 if it has none."""
    try:
        return len(what)
    except (TypeError, NotImplementedError):
        return 0
