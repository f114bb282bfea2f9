"""What a checkpoint is on the disk: the names of its files, its manifest, and whether it is whole."""

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from cos598d.records.conventions import CHECKPOINTS
from cos598d.terminal.printable import printable
from cos598d.terminal.reading import open_plain, parse_json

FORMAT = 2
FOLDER = CHECKPOINTS  # in a run's output folder
MANIFEST, TRAINING = "manifest.json", "training.json"
MODEL_FOLDER, MODEL = "model", "model/model.safetensors"
OPTIMIZER, OWN, RANK = "optimizer.rank{rank}.safetensors", "own.rank{rank}.safetensors", "rank{rank}.json"
CHUNK_BYTES = 4 << 20  # what is read or written at a time
MOST_JSON_BYTES = 64 << 20

_STEP = re.compile(r"step-(\d{8,15})")
# What this package may leave beside the checkpoints when it is killed, and nothing else.
_LEFT = re.compile(r"\.(?:(step-\d{8,15})\.[0-9a-f]{16}\.(partial|old|removed)|probe-[0-9a-f]{16})")
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class Damaged(Exception):
    """A checkpoint is not whole; the message says what of it, in words that fit in brackets."""


@dataclass(frozen=True)
class Written:
    """What the manifest says of one file: its size in bytes, and its SHA-256 in hexadecimal digits."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of; written last, so that a checkpoint without one is half-written.

    run: what all checkpoints of a run have in common, through its restarts. iteration: the last one that it contains.
    world_size: how many ranks it is of. is_best: whether it was the best of its run when it was written.
    files: by their names within the checkpoint's folder.
    """

    run: str
    iteration: int
    world_size: int
    is_best: bool
    files: Mapping[str, Written]

    def text(self) -> str:
        """Its JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"


def step_name(iteration: int) -> str:
    """What the folder of a checkpoint is called."""
    return f"step-{iteration:08d}"


def beside_name(name: str, token: str, what: str) -> str:
    """What the folder `name` is called while it is "partial", "old" (to be replaced) or "removed"."""
    return f".{name}.{token}.{what}"


def probe_name(token: str) -> str:
    """What the folder is called in which ranks find out whether they share a disk."""
    return f".probe-{token}"


def left_over(name: str) -> tuple[str | None, str | None] | None:
    """Of a name that this package gives to what should not last: which checkpoint's, and what it is; else None."""
    found = _LEFT.fullmatch(name)
    return (found[1], found[2]) if found else None


def steps(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints in `folder`, whole or not, by their iterations, the last first. Never by the clock."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            name = _STEP.fullmatch(entry.name)
            # Two ways to write one number would be two checkpoints of one iteration.
            if name and entry.is_dir(follow_symlinks=False) and entry.name == step_name(int(name[1])):
                found.append((int(name[1]), folder / entry.name))
    return sorted(found, reverse=True)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`, held to its form and to the sizes of the files that it names.

    Raises Damaged. The files' contents are not looked at: `check_digests` does.
    """
    value = read_json_inside(folder, MANIFEST)
    if not isinstance(value, dict):
        raise Damaged(f"{MANIFEST} is not a JSON object")
    if _whole_number(value, "format") != FORMAT:
        raise Damaged(
            f"{MANIFEST} has the format {printable(value.get('format'), 40)}, and this program reads {FORMAT}"
        )
    files = value.get("files")
    if not isinstance(files, dict) or not files:
        raise Damaged(f"{MANIFEST} names no files")
    run, is_best = value.get("run"), value.get("is_best")
    if not isinstance(run, str) or not isinstance(is_best, bool):
        raise Damaged(f"{MANIFEST} does not say whose it is")
    manifest = Manifest(
        run=run,
        iteration=_whole_number(value, "iteration"),
        world_size=_whole_number(value, "world_size"),
        is_best=is_best,
        files={_file_name(name): _written(name, facts) for name, facts in files.items()},
    )
    if _STEP.fullmatch(folder.name) and folder.name != step_name(manifest.iteration):
        raise Damaged(f"{MANIFEST} is that of iteration {printable(manifest.iteration, 40)}")
    if not 1 <= manifest.world_size <= len(files):
        raise Damaged(f"{MANIFEST} speaks of {printable(manifest.world_size, 40)} ranks and of {len(files)} files")
    needed = [MODEL, TRAINING, *(RANK.format(rank=rank) for rank in range(manifest.world_size))]
    for name in needed:
        if name not in manifest.files:
            raise Damaged(f"{MANIFEST} does not name {name}")
    for name, written in manifest.files.items():
        with open_inside(folder, name) as file:
            size = os.fstat(file.fileno()).st_size
        if size != written.bytes:
            raise Damaged(f"{name} has {size} bytes instead of {printable(written.bytes, 40)}")
    return manifest


def check_digests(folder: Path, manifest: Manifest) -> None:
    """Read every file and raise Damaged, which names it, for one that does not have the digest in the manifest."""
    for name, written in manifest.files.items():
        digest = hashlib.sha256()
        with open_inside(folder, name) as file:
            try:
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
            except OSError as error:
                raise Damaged(f"{name} cannot be read: {error.strerror}") from None
        if digest.hexdigest() != written.sha256:
            raise Damaged(f"{name} has not the SHA-256 that was written")


def read_json_inside(folder: Path, name: str) -> Any:
    """The value of a JSON file of a checkpoint. Raises Damaged."""
    with open_inside(folder, name) as file:
        try:
            content = file.read(MOST_JSON_BYTES + 1)
            if len(content) > MOST_JSON_BYTES:
                raise Damaged(f"{name} has more than {MOST_JSON_BYTES >> 20} MiB")
            return parse_json(content.decode("utf-8"))
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise Damaged(f"{name} is not JSON: {printable(error, 200)}") from None


def open_inside(folder: Path, name: str) -> IO[bytes]:
    """Open a plain file of a checkpoint for reading; no link leads out of the folder. Raises Damaged."""
    path = folder / name
    try:
        if path.parent != folder and not stat.S_ISDIR(os.lstat(path.parent).st_mode):
            raise Damaged(f"{path.parent.name} is not a folder")
        return open_plain(path, "rb", follows=False)
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except OSError as error:
        raise Damaged(f"{name} cannot be opened: {error.strerror}") from None


def _file_name(name: str) -> str:
    """A file's name as this package gives them: plain ones, in the folder itself or in the model's."""
    parts = name.split("/")
    if len(parts) > 2 or (len(parts) == 2 and parts[0] != MODEL_FOLDER) or not all(map(_PLAIN.fullmatch, parts)):
        raise Damaged(f"{MANIFEST} names {printable(name, 100)!r}, which is no file of a checkpoint")
    return name


def _written(name: str, facts: Any) -> Written:
    if isinstance(facts, dict) and isinstance(digest := facts.get("sha256"), str):
        return Written(_whole_number(facts, "bytes"), digest)
    raise Damaged(f"{MANIFEST} does not give the SHA-256 of {printable(name, 100)}")


def _whole_number(facts: Mapping[str, Any], name: str) -> int:
    value = facts.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise Damaged(f"{MANIFEST} has {printable(value, 40)} for {name}, not a whole number")
    return value
