"""Who hands out the samples: torch's loaders and distributed samplers, what each goes through, and its epochs."""

import functools
import time
from collections.abc import Callable
from typing import Any

from torch.utils import data
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from cos598d.audit.watch.places import Place, here

_MOST = 64  # loaders, and epochs of a sampler, that are noted
_listener: "Data | None" = None


class Data:
    """The loaders and samplers of this process, by the order in which they were first iterated over.

    `backward` says that a batch was trained on: the loader, and the sampler, that began last had it.
    """

    def __init__(self) -> None:
        global _listener  # noqa: PLW0603 - the classes below are this process's, too
        self.loaders: dict[int, dict[str, Any]] = {}
        self.samplers: dict[int, dict[str, Any]] = {}
        self.seconds = 0.0
        self._last: dict[str, dict[str, Any]] = {}
        self._alive: list[Any] = []  # so that no two have the same id
        if _listener is None:
            _install()
        _listener = self

    def close(self) -> None:
        """Watch no longer."""
        global _listener  # noqa: PLW0603
        _listener = None

    def backward(self) -> None:
        """A batch has just been trained on."""
        for each in self._last.values():
            each["trains"] = True

    def loader_began(self, loader: Any) -> None:
        """An epoch of a loader begins."""
        sampler = getattr(loader, "sampler", None)
        self._began("loader", self.loaders, loader, {
            "sampler": type(sampler).__name__,
            "dataset_length": _length(loader.dataset),
            "sampler_length": _length(sampler),
            "is_distributed": isinstance(sampler, DistributedSampler) or hasattr(sampler, "num_replicas"),
        })  # fmt: skip

    def sampler_began(self, sampler: DistributedSampler) -> None:
        """A distributed sampler draws an epoch."""
        self._began("sampler", self.samplers, sampler, {
            "replicas": int(sampler.num_replicas),
            "rank": int(sampler.rank),
            "dataset_length": _length(sampler.dataset),
            "total_length": int(sampler.total_size),
            "shuffles": bool(sampler.shuffle),
            "seed": int(sampler.seed),
            "epochs": [],
        })  # fmt: skip
        known = self.samplers.get(id(sampler))
        if known is not None and len(known["epochs"]) < _MOST:
            known["epochs"].append(int(sampler.epoch))

    def _began(self, kind: str, known: dict[int, dict[str, Any]], what: Any, facts: dict[str, Any]) -> None:
        if id(what) not in known:
            if len(known) >= _MOST:
                return
            place: Place = here()
            known[id(what)] = facts | {"times": 0, "trains": False, "where": [*place]}
            self._alive.append(what)
        known[id(what)]["times"] += 1
        self._last[kind] = known[id(what)]
        if kind == "loader":  # which has a sampler of its own: another one's draws are not for it
            self._last.pop("sampler", None)


def _length(what: Any) -> int:
    """How long it is; 0 where it does not say."""
    try:
        return len(what)
    except (TypeError, NotImplementedError):
        return 0


def _wrap(kind: type, name: str, around: Callable[..., Any]) -> None:
    original = getattr(kind, name)

    @functools.wraps(original)
    def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
        return around(original, self, *arguments, **options)

    setattr(kind, name, wrapped)


def _install() -> None:
    def of_loader(original: Callable[..., Any], loader: Any) -> Any:
        if _listener is not None:
            _listener.loader_began(loader)
        return original(loader)

    def of_sampler(original: Callable[..., Any], sampler: Any) -> Any:
        if _listener is not None:
            _listener.sampler_began(sampler)
        return original(sampler)

    def of_batch(original: Callable[..., Any], batches: Any) -> Any:
        began = time.perf_counter()
        try:
            return original(batches)
        finally:
            if _listener is not None:
                _listener.seconds += time.perf_counter() - began

    _wrap(data.DataLoader, "__iter__", of_loader)
    _wrap(DistributedSampler, "__iter__", of_sampler)
    _wrap(_BaseDataLoaderIter, "__next__", of_batch)
