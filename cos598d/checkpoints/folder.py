"""The files of a checkpoint, which only rank 0 writes and reads.

    step-00000012/model/           a model's folder: weights and buffers, configuration, vocabulary
    step-00000012/state.safetensors    what the optimizer remembers, and all buffers: KIND/NAME
    step-00000012/rankR.safetensors    what only rank R has: random states, and what its sync keeps
    step-00000012/training.json        the rest, as `Training`

A checkpoint gets its name when all of it is on the disk. So a killed process leaves the older ones as they were.
"""

import contextlib
import os
import re
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
from cos598d.errors import first_line
from cos598d.plan import Position
from cos598d.records.conventions import CHECKPOINTS
from cos598d.state import OF_MODEL

FORMAT = 3
FOLDER = CHECKPOINTS  # in a run's output folder
MODEL, STATE, OF_RANK, TRAINING = (
    "model/model.safetensors",
    "state.safetensors",
    "rank{rank}.safetensors",
    "training.json",
)
WEIGHTS, BUFFERS = OF_MODEL

_STEP = re.compile(r"step-(\d{8,15})")
_UNFINISHED = re.compile(r"\.step-\d{8,15}")
Count = Annotated[int, Meta(ge=0)]


class Damaged(Exception):
    """A checkpoint is incomplete or damaged. The message has the file and the fault, as a phrase for brackets."""


class Training(Struct, frozen=True):
    """training.json. `run` is equal in all checkpoints of a run, through its restarts; `ranks` have saved it.

    sync: the sync's name and options, on which the ranks' own state depends. scale, good_steps: fp16's loss scale, and
    the steps since it has changed. facts: what must be equal in every attempt of a run.
    """

    format: int
    run: str
    iteration: Count
    ranks: Annotated[int, Meta(ge=1, le=65536)]
    sync: dict[str, Any]
    position: Position
    best: Best
    facts: dict[str, Any]
    scale: Annotated[float, Meta(ge=1)] | None = None
    good_steps: Count = 0


@dataclass
class Found:
    """A checkpoint that can be read. `tensors` is its state under plain names, on rank 0 only."""

    path: Path
    training: Training
    tensors: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    def own(self, rank: int) -> dict[str, torch.Tensor]:
        """What only this rank had."""
        return load_file(self.path / OF_RANK.format(rank=rank))


def step_name(iteration: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step-{iteration:08d}"


def steps(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints in `folder`, damaged ones too, by iteration, the last first. Clocks play no role."""
    places = folder.iterdir() if folder.is_dir() else ()
    named = [(int(name[1]), place) for place in places if (name := _STEP.fullmatch(place.name))]
    return sorted(((number, place) for number, place in named if place.name == step_name(number)), reverse=True)


def tidy(folder: Path) -> None:
    """Create the folder, and remove what killed saves have left in it. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for place in folder.iterdir():
        if _UNFINISHED.fullmatch(place.name):
            shutil.rmtree(place)


def remove_all(folder: Path) -> None:
    """Remove all checkpoints, and `folder` if nothing else is in it. Raises OSError."""
    if folder.is_dir():
        tidy(folder)
        for _, place in steps(folder):
            shutil.rmtree(place)
        with contextlib.suppress(OSError):
            folder.rmdir()


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
    made, target = folder / f".{step_name(training.iteration)}", folder / step_name(training.iteration)
    shutil.rmtree(made, ignore_errors=True)
    try:
        (made / MODEL).parent.mkdir(parents=True)
        describe((made / MODEL).parent)
        of_model = {key.partition("/")[2]: t for key, t in tensors.items() if key.partition("/")[0] in OF_MODEL}
        others = {key: tensor for key, tensor in tensors.items() if key.partition("/")[0] != WEIGHTS}
        (made / TRAINING).write_bytes(msgspec.json.format(msgspec.json.encode(training), indent=1))
        of_ranks = {OF_RANK.format(rank=rank): kept for rank, kept in enumerate(own)}
        for name, part in ({MODEL: of_model, STATE: others} | of_ranks).items():
            save_file(dict(part), made / name, {"format": "pt"})
            shutil.copymode(made / TRAINING, made / name)  # the library's files can be read by their owner only
        for path in (*sorted(made.rglob("*")), made):
            _to_disk(path)
        if target.exists():
            shutil.rmtree(target)
        made.rename(target)
        _to_disk(folder)
        _prune(folder, training.iteration, keep, training.best.iteration)
    except SafetensorError as error:
        raise OSError(first_line(error)) from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def read(path: Path) -> Found:
    """The checkpoint in the folder `path`. Raises Damaged."""
    try:
        training = msgspec.json.decode((path / TRAINING).read_bytes(), type=Training)
        if training.format != FORMAT:
            raise Damaged(f"{TRAINING} has the format {training.format}, and this program reads {FORMAT}")
        position = training.position
        known = (position.stepped, position.evaluated, position.epoch_iterations, training.best.iteration)
        if position.iteration != training.iteration or path.name != step_name(training.iteration):
            raise Damaged(f"{TRAINING} belongs to iteration {training.iteration}")
        if not all(0 <= number <= training.iteration for number in known):
            raise Damaged(f"{TRAINING} counts more steps than its {training.iteration} iterations")
        others = load_file(path / STATE)
        weights = {f"{WEIGHTS}/{n}": t for n, t in load_file(path / MODEL).items() if f"{BUFFERS}/{n}" not in others}
        for rank in range(training.ranks):
            with safe_open(path / OF_RANK.format(rank=rank), framework="pt") as file:
                file.keys()
    except OSError as error:
        where = f"{Path(error.filename).name} " if error.filename else ""
        raise Damaged(f"{where}cannot be read: {error.strerror or first_line(error)}") from None
    except (SafetensorError, msgspec.DecodeError, ValueError) as error:
        raise Damaged(f"a file is damaged: {first_line(error)}") from None
    return Found(path, training, weights | others)


def newest(folder: Path) -> tuple[Found | None, list[str]]:
    """The newest checkpoint in `folder` that can be read, and sentences about newer ones that cannot."""
    remarks: list[str] = []
    for _, place in steps(folder):
        try:
            found = read(place)
        except Damaged as error:
            remarks.append(f"the checkpoint {place} is damaged ({error}).")
            continue
        return found, remarks
    return None, remarks


def _prune(folder: Path, latest: int, keep: int, best: int) -> None:
    """Remove old checkpoints, and those of later iterations: they are damaged, or another attempt's."""
    known = steps(folder)
    kept = [number for number, _ in known if number <= latest][:keep]
    for number, place in known:
        if number not in (*kept, best) or number > latest:
            shutil.rmtree(place)


def _to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, would survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
