"""The files of a checkpoint, which only rank 0 writes and reads.

    step-00000012/model/           a model's folder: weights and buffers, configuration, vocabulary
    step-00000012/state.safetensors    what the optimizer remembers, and all buffers: KIND/NAME
    step-00000012/rankR.safetensors    what only rank R has: random states, and what its sync keeps
    step-00000012/training.json        the rest, as `Training`

A checkpoint gets its name when all of it is on the disk. So a killed process leaves the older ones as they were.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta, Struct
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from cos598d.checkpoints.stopping import Best
from cos598d.errors import UsageError, first_line
from cos598d.plan import Position
from cos598d.records.conventions import CHECKPOINTS
from cos598d.state import OF_MODEL

FORMAT = 3
FOLDER = CHECKPOINTS  # in a run's output folder
MODEL, STATE, TRAINING = "model/model.safetensors", "state.safetensors", "training.json"
WEIGHTS, BUFFERS = OF_MODEL


class Damaged(UsageError):
    """A checkpoint is incomplete or damaged."""


class Training(Struct, frozen=True):
    """training.json. `ranks` have saved it.

    sync: the sync's name and options, on which the ranks' own state depends. scaler: the state of fp16's loss scale.
    facts: what must be equal in every attempt of a run.
    """

    format: int
    iteration: int
    ranks: Annotated[int, Meta(ge=1, le=65536)]
    sync: dict[str, Any]
    position: Position
    best: Best
    scaler: dict[str, float]
    facts: dict[str, Any]


@dataclass
class Found:
    """A checkpoint that can be read. `tensors` is its state under plain names, on rank 0 only."""

    path: Path
    training: Training
    tensors: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)


def of_rank(path: Path, rank: int) -> Path:
    """The file with what only this rank has."""
    return path / f"rank{rank}.safetensors"


def place_of(folder: Path, iteration: int) -> Path:
    """The folder of the checkpoint of this iteration."""
    return folder / f"step-{iteration:08d}"


def steps(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints in `folder`, damaged ones too, by iteration, the last first. Clocks play no role."""
    numbered = [(place.name.removeprefix("step-"), place) for place in folder.glob("step-*")]
    return sorted(((int(number), place) for number, place in numbered if number.isdecimal()), reverse=True)


def remove_all(folder: Path) -> None:
    """Remove all checkpoints. Raises OSError."""
    _remove_unfinished(folder)
    for _, place in steps(folder):
        shutil.rmtree(place)


def write(
    folder: Path,
    training: Training,
    tensors: Mapping[str, torch.Tensor],
    own: Sequence[Mapping[str, torch.Tensor]],
    describe: Callable[[Path], None],
    keep: int,
) -> None:
    """Write a checkpoint, then remove all but the `keep` newest and the best. Raises OSError, and leaves nothing.

    tensors: the state, on the host. own: what only single ranks have. describe: writes a model's other files.
    """
    target = place_of(folder, training.iteration)
    made = folder / f".{target.name}"
    _remove_unfinished(folder)
    try:
        (made / MODEL).parent.mkdir(parents=True)
        describe((made / MODEL).parent)
        (made / TRAINING).write_bytes(msgspec.json.format(msgspec.json.encode(training), indent=1))
        files = {of_rank(made, rank): kept for rank, kept in enumerate(own)}
        files[made / MODEL] = {key.partition("/")[2]: t for key, t in tensors.items() if key.startswith(OF_MODEL)}
        files[made / STATE] = {key: tensor for key, tensor in tensors.items() if not key.startswith(WEIGHTS)}
        for path, part in files.items():
            save_file(dict(part), path, {"format": "pt"})
            shutil.copymode(made / TRAINING, path)  # the library's files can be read by their owner only
        for path in (*made.rglob("*"), made):
            _to_disk(path)
        if target.exists():
            shutil.rmtree(target)
        made.rename(target)
        _to_disk(folder)
        kept_back = [number for number, _ in steps(folder) if number <= training.iteration][:keep]
        for number, place in steps(folder):  # those of later iterations are damaged, or another attempt's
            if number not in (*kept_back, training.best.iteration) or number > training.iteration:
                shutil.rmtree(place)
    except SafetensorError as error:
        raise OSError(first_line(error)) from None
    finally:
        _remove_unfinished(folder)


def read(path: Path) -> Found:
    """The checkpoint in the folder `path`. Raises Damaged."""
    try:
        training = msgspec.json.decode((path / TRAINING).read_bytes(), type=Training)
        if training.format != FORMAT:
            raise ValueError(f"{TRAINING} has the format {training.format}, and this program reads {FORMAT}")
        if training.position.iteration != training.iteration or path != place_of(path.parent, training.iteration):
            raise ValueError(f"{TRAINING} belongs to iteration {training.iteration}")
        others = load_file(path / STATE)
        weights = {f"{WEIGHTS}/{n}": t for n, t in load_file(path / MODEL).items() if f"{BUFFERS}/{n}" not in others}
        for rank in range(training.ranks):
            with safe_open(of_rank(path, rank), framework="pt") as file:
                file.keys()
    except (OSError, SafetensorError, msgspec.DecodeError, ValueError) as error:
        raise Damaged(f"the checkpoint {path} is damaged ({first_line(error)}). Resume from another one.") from None
    return Found(path, training, weights | others)


def newest(folder: Path) -> tuple[Found | None, list[str]]:
    """The newest checkpoint in `folder` that can be read, and sentences about newer ones that cannot."""
    remarks: list[str] = []
    for _, place in steps(folder):
        try:
            return read(place), remarks
        except Damaged as error:
            remarks.append(str(error))
    return None, remarks


def _remove_unfinished(folder: Path) -> None:
    """Remove what this save, or a killed one, has left."""
    for place in folder.glob(".step-*"):
        shutil.rmtree(place, ignore_errors=True)


def _to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, would survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
