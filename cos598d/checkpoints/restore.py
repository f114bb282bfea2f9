"""Resuming from a checkpoint: which one, whether it is complete, and its state on every rank, read only by rank 0."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cos598d.checkpoints.contents import Forms, OpenCheckpoint
from cos598d.checkpoints.folder import put_back
from cos598d.checkpoints.layout import (
    FOLDER,
    MANIFEST,
    MODEL,
    RANK,
    TRAINING,
    Damaged,
    as_bytes,
    check_digests,
    read_manifest,
    steps,
)
from cos598d.checkpoints.snapshot import OF_STRATEGY, OF_TRAINING, RankState
from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import dtype_name
from cos598d.errors import UsageError, UserError
from cos598d.records.conventions import STATE
from cos598d.strategies.base import Strategy
from cos598d.strategies.state import BUFFERS, WEIGHTS, FullTensor, put_into_model
from cos598d.terminal.locks import locked

AUTO = "auto"
AS_GIVEN = Forms()
START_OVER, NOT_THIS_ONE = "Start over with --overwrite_output_dir.", "Leave out --resume to start over."


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found complete. Every rank has one; only rank 0 reads its files.

    training: from `Checkpoints.save`. own_is_lost: the saved strategy's phrase. run: equal in all checkpoints of one
    run. remarks: sentences about damaged ones that were skipped. contents: the files, on rank 0.
    """

    path: Path
    run: str
    iteration: int
    world_size: int
    sync: dict[str, Any]
    scalars: dict[str, Any]
    training: dict[str, Any]
    own_is_lost: str | None = None
    remarks: list[str] = field(default_factory=list)
    contents: OpenCheckpoint | None = field(default=None, repr=False)

    def restore(
        self, strategy: Strategy, comm: Communicator, sync: Mapping[str, Any]
    ) -> tuple[RankState | None, str | None]:
        """Load `strategy`, attached and not stepped yet, on every rank.

        Return the saved state of the rank with this number, apart from its strategy's (None if there was no such rank).
        Also return a phrase about what could not be restored (None for nothing). `sync` is the argument of
        `Checkpoints`. If it or the number of ranks has changed, the strategy's state of single ranks is dropped.

        Raises UserError, the same on every rank, if this is another model's checkpoint; and on one rank, if its own
        file does not fit its strategy.
        """
        strategy.load_state(self._wholes(comm))
        strategy.load_scalars(self.scalars)
        is_same_world = comm.world_size == self.world_size and dict(sync) == self.sync
        own = self._own(comm, (OF_TRAINING, OF_STRATEGY) if is_same_world else (OF_TRAINING,))
        self._close()
        if is_same_world:
            try:
                strategy.load_own_state(*own[OF_STRATEGY])
            except UserError as error:
                raise UsageError(f"{self.path / RANK.format(rank=comm.rank)}: {error}") from error
        return RankState(*own[OF_TRAINING]) if own else None, None if is_same_world else self.own_is_lost

    def facts_of_ranks(self, name: str, comm: Communicator) -> list[Any]:
        """The fact `name` of every rank's `RankState`, in order of rank. Every rank must call it."""
        here = self.contents
        every = [here.own(rank, (OF_TRAINING,))[0] for rank in range(self.world_size)] if here else None
        return [facts[OF_TRAINING][name] for facts in _broadcast_json(comm, every, name)]

    def load_model(self, model: nn.Module, comm: Communicator) -> None:
        """Load only weights and buffers into a model that is whole on every rank. Every rank must call it.

        Raises UserError, the same on every rank, if this is another model's checkpoint.
        """
        missing = dict.fromkeys(name for name, _ in (*model.named_parameters(), *model.named_buffers()))
        for whole in self._wholes(comm, (WEIGHTS, BUFFERS)):
            put_into_model(model, whole)
            missing.pop(whole.name, None)
        self._close()
        if missing:
            raise UsageError(
                f"{self.path / MODEL} lacks {next(iter(missing))}, a parameter of this model. Remove {self.path}."
            )

    def _close(self) -> None:
        if self.contents:
            self.contents.close()

    def _wholes(self, comm: Communicator, kinds: Sequence[str] = ()) -> Iterator[FullTensor]:
        """Yield every tensor of the state, of some `kinds` or all, on every rank."""
        here = self.contents
        entries = _broadcast_json(comm, [entry.facts() for entry in here.entries] if here else None, "checkpoint")
        for place, (kind, name, shape, dtype, file) in enumerate(entries):
            if kinds and kind not in kinds:
                continue
            tensor = here.read(place) if here else torch.empty(shape, dtype=getattr(torch, dtype))
            _broadcast(comm, tensor, f"{kind}/{name}")
            yield FullTensor(kind, name, tensor, str(self.path / file))

    def _own(
        self, comm: Communicator, whose: Sequence[str]
    ) -> dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]]:
        """This rank's saved state, by owner, which no other rank receives. Empty if there was no such rank."""
        mine = {}
        for rank in range(min(self.world_size, comm.world_size)):
            facts, tensors = self.contents.own(rank, whose) if self.contents else ({}, {})
            forms = [(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in tensors.items()]
            facts, forms = _broadcast_json(comm, (facts, forms), f"rank{rank}")
            if comm.rank == rank and rank:
                tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, shape, dtype in forms}
            transfer(comm, {f"rank{rank}": tensors}, source=0, target=rank)
            if comm.rank == rank:
                for one in whose:
                    prefix = f"{one}/"
                    its = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
                    mine[one] = facts[one], its
        return mine


def find(resume: str, folder: Path | None, comm: Communicator, forms: Forms = AS_GIVEN) -> Checkpoint | None:
    """The checkpoint to resume from, the same on every rank. Every rank must call it, and only rank 0 looks.

    `resume` is "auto" or a path. "auto" is the newest complete one in `folder`, a run's folder of checkpoints, or None
    if there is none at all. A path is a checkpoint, or a run's folder or its folder of checkpoints, in which the newest
    complete one is taken. One whose values do not have these `forms` counts as damaged. Raises UserError, the same on
    every rank, with the damaged ones, if none can be used.
    """
    return _on_all_ranks(
        comm, lambda: _newest(folder, forms) if resume == AUTO else _named(Path(resume).expanduser(), forms)
    )


def find_best(folders: Sequence[Path], run: str, comm: Communicator) -> Checkpoint | None:
    """The best complete checkpoint of a run in one of `folders`, the same on every rank. Every rank calls it."""

    def look() -> Checkpoint | None:
        for place in (place for folder in folders if folder.is_dir() for _, place in steps(folder)):
            with contextlib.suppress(Damaged):
                manifest = read_manifest(place)
                if manifest.is_best and manifest.run == run:  # each was better than all before it
                    return open_checkpoint(place)
        return None

    return _on_all_ranks(comm, look)


def _on_all_ranks(comm: Communicator, look: Callable[[], Checkpoint | None]) -> Checkpoint | None:
    """Rank 0's result on every rank; its UserError too."""
    found: Checkpoint | None = None
    facts: dict[str, Any] = {}
    if comm.rank == 0:
        try:
            found = look()
        except UserError as error:
            facts["refused"] = str(error)
        if found:
            facts = {**vars(found), "path": str(found.path), "contents": None}
    facts = comm.exchange(facts)[0]
    if "refused" in facts:
        raise UsageError(facts["refused"])
    if comm.rank == 0 or not facts:
        return found
    return Checkpoint(**{**facts, "path": Path(facts["path"])})


def open_checkpoint(path: Path, forms: Forms = AS_GIVEN) -> Checkpoint:
    """The checkpoint in the folder `path`, every byte of it verified. Raises Damaged."""
    manifest = read_manifest(path)
    check_digests(path, manifest)
    contents = OpenCheckpoint(path, manifest, forms)
    given = {name: contents.training[name] for name in ("sync", "scalars", "training")}
    lost = contents.training.get("own_is_lost")
    return Checkpoint(
        path, manifest.run, manifest.iteration, manifest.world_size, **given, own_is_lost=lost, contents=contents
    )


def _named(path: Path, forms: Forms) -> Checkpoint:
    """The checkpoint of a path that the user gave."""
    if not path.is_dir():
        raise UserError(f"--resume {path}: there is no such folder. Give a checkpoint's, a run's, or auto.")
    if (path / FOLDER).is_dir():
        path = path / FOLDER
    if not (path / MANIFEST).exists() and (newest := _newest(path, forms, NOT_THIS_ONE)):
        return newest
    if not any((path / name).exists() for name in (MANIFEST, TRAINING, MODEL)):
        raise UserError(f"--resume {path}: this folder has no checkpoint. Give a run's folder with one, or auto.")
    try:
        return open_checkpoint(path, forms)
    except Damaged as error:
        raise UserError(
            f"--resume {path}: this checkpoint is incomplete or damaged ({error}). Give another one, or auto."
        ) from None


def _newest(folder: Path | None, forms: Forms, fix: str = START_OVER) -> Checkpoint | None:
    """The newest complete checkpoint; None if there is none at all. Raises UserError if there are only damaged ones."""
    if folder is None or not folder.is_dir():
        return None
    with contextlib.suppress(OSError), locked(folder) as is_alone:  # a folder without write permission is read as it is
        if is_alone and not folder.is_symlink():
            put_back(folder)
    remarks: list[str] = []
    for _, place in steps(folder):
        try:
            found = open_checkpoint(place, forms)
        except Damaged as error:
            remarks.append(f"the checkpoint {place} is damaged ({error}).")
            continue
        found.remarks.extend(remarks)
        return found
    if remarks:
        others = f", and {len(remarks) - 1} more" if len(remarks) > 1 else ""
        raise UserError(f"no usable checkpoint is left in {folder}: {remarks[0].removesuffix('.')}{others}. {fix}")
    return None


def transfer(comm: Communicator, files: Mapping[str, Mapping[str, torch.Tensor]], *, source: int, target: int) -> None:
    """Send the source's tensors, on the host, into the target's of the same names. Other ranks do nothing."""
    if source == target or comm.rank not in (source, target):
        return
    for file, tensors in files.items():
        for name, tensor in tensors.items():
            with (
                _travelling(comm, tensor, comm.rank == target) as memory,
                comm.composed("send", memory, f"{file}/{name}", purpose=STATE) as call,
            ):
                if comm.rank == source:
                    call.swap(sends=[(memory, target)])
                else:
                    call.swap(receives=[(memory, source)])


def _broadcast_json(comm: Communicator, value: Any, name: str) -> Any:
    """Rank 0's value (JSON of any length) on every rank."""
    text = bytearray(json.dumps(value).encode()) if comm.rank == 0 else bytearray()
    size = torch.tensor([len(text)])
    _broadcast(comm, size, name)
    content = torch.frombuffer(text, dtype=torch.uint8) if comm.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
    _broadcast(comm, content, name)
    return json.loads(content.numpy().tobytes())


def _broadcast(comm: Communicator, tensor: torch.Tensor, name: str) -> None:
    """Put rank 0's tensor, on the host, into each rank's."""
    if comm.world_size > 1:
        with _travelling(comm, tensor, comm.rank > 0) as memory:
            comm.broadcast(memory, name, purpose=STATE)


@contextlib.contextmanager
def _travelling(comm: Communicator, tensor: torch.Tensor, arrives: bool) -> Iterator[torch.Tensor]:
    """The bytes of a host tensor on the device from which the backend sends. If it `arrives`, they are copied back."""
    host = as_bytes(tensor)
    memory = host if comm.backend == "gloo" else host.to(comm.device)  # nccl sends from a device
    yield memory
    if arrives and memory is not host:
        host.copy_(memory)
