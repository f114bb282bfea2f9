"""The files of a checkpoint, which only rank 0 writes and reads.

    step-00000012/model/           a model's folder: weights and buffers, configuration, vocabulary
    step-00000012/state.safetensors    KIND/NAME, what the optimizer remembers, and all buffers; and rankR/NAME, what
                                       only rank R has: random states, and what its sync keeps
    step-00000012/training.json        the rest, as `Training`

A checkpoint gets its name when all of it is on the disk. So a killed process leaves the older ones as they were.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from cos598d.errors import first_line
from cos598d.plan import Position
from cos598d.state import OF_MODEL

MODEL, STATE, TRAINING = "model/model.safetensors", "state.safetensors", "training.json"
WEIGHTS, BUFFERS = OF_MODEL
UNREADABLE = (OSError, SafetensorError, msgspec.DecodeError, ValueError)  # what a damaged file raises


class Training(Struct, frozen=True):
    """training.json. `ranks` have saved it.

    sync: the sync's name and options, on which the ranks' own state depends. scaler: the state of fp16's loss scale.
    facts: what must be equal in every attempt of a run.
    """

    format: Literal[4]
    ranks: int
    sync: dict[str, Any]
    position: Position
    scaler: dict[str, float]
    facts: dict[str, Any]


@dataclass
class Found:
    """A checkpoint that can be read. `tensors` is its state under plain names, on rank 0 only."""

    path: Path
    training: Training
    tensors: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)


def place_of(folder: Path, iteration: int) -> Path:
    """The folder of the checkpoint of this iteration."""
    return folder / f"step-{iteration:08d}"


def steps(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints in `folder`, damaged ones too, by iteration, the last first. Clocks play no role."""
    numbered = [(place.name.removeprefix("step-"), place) for place in folder.glob("step-*")]
    return sorted(((int(number), place) for number, place in numbered if number.isdecimal()), reverse=True)


def write(
    folder: Path, training: Training, tensors: Mapping[str, torch.Tensor], describe: Callable[[Path], None], keep: int
) -> None:
    """Write a checkpoint, then remove all but the `keep` newest. Leaves nothing of it if that fails.

    tensors: the state, on the host. describe: writes a model's other files. Raises OSError or SafetensorError.
    """
    iteration = training.position.iteration
    target = place_of(folder, iteration)
    made = folder / f".{target.name}"
    _remove_unfinished(folder)
    try:
        (made / MODEL).parent.mkdir(parents=True)
        describe((made / MODEL).parent)
        (made / TRAINING).write_bytes(msgspec.json.format(msgspec.json.encode(training), indent=1))
        weights = {key.partition("/")[2]: tensor for key, tensor in tensors.items() if key.startswith(OF_MODEL)}
        others = {key: tensor for key, tensor in tensors.items() if not key.startswith(WEIGHTS)}
        for name, part in ((MODEL, weights), (STATE, others)):
            save_file(part, made / name, {"format": "pt"})
            shutil.copymode(made / TRAINING, made / name)  # the library's files can be read by their owner only
        for path in (*made.rglob("*"), made):
            _to_disk(path)
        if target.exists():
            shutil.rmtree(target)
        made.rename(target)
        _to_disk(folder)
        # Those of later iterations are damaged, or another attempt's.
        kept = [number for number, _ in steps(folder) if number <= iteration][:keep]
        for number, place in steps(folder):
            if number not in kept:
                shutil.rmtree(place)
    finally:
        _remove_unfinished(folder)


def read(path: Path) -> Found:
    """The checkpoint in the folder `path`. Raises one of UNREADABLE."""
    training = msgspec.json.decode((path / TRAINING).read_bytes(), type=Training)
    others = load_file(path / STATE)
    weights = {f"{WEIGHTS}/{n}": t for n, t in load_file(path / MODEL).items() if f"{BUFFERS}/{n}" not in others}
    return Found(path, training, weights | others)


def newest(folder: Path) -> tuple[Found | None, list[str]]:
    """The newest checkpoint in `folder` that can be read, and sentences about newer ones that cannot."""
    remarks: list[str] = []
    for _, place in steps(folder):
        try:
            return read(place), remarks
        except UNREADABLE as error:
            remarks.append(f"the checkpoint {place} is damaged ({first_line(error)}).")
    return None, remarks


def _remove_unfinished(folder: Path) -> None:
    """Remove what a save that failed, or was killed, has left."""
    for place in folder.glob(".step-*"):
        shutil.rmtree(place, ignore_errors=True)


def _to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, would survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
