"""The files of a checkpoint: their names, how they are written, and whether they are complete.

Named tensors are safetensors files: 8 bytes with the length of the header, the header as JSON, and the tensors' bytes
in the order of the header (https://huggingface.co/docs/safetensors). Only the library's reader is used. Its writer
would make files that only their owner may read, and would hide a full disk's OSError.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
import torch

from cos598d.records.conventions import CHECKPOINTS
from cos598d.terminal.files import sync_to_disk
from cos598d.terminal.printable import printable
from cos598d.terminal.reading import open_plain, parse_json

FORMAT = 2
FOLDER = CHECKPOINTS  # in a run's output folder
MANIFEST, TRAINING = "manifest.json", "training.json"
MODEL_FOLDER, MODEL = "model", "model/model.safetensors"
OPTIMIZER, OWN, RANK = "optimizer.rank{rank}.safetensors", "own.rank{rank}.safetensors", "rank{rank}.json"
CHUNK_BYTES = 4 << 20  # the size of reads and writes
MOST_JSON_BYTES = 64 << 20
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

_STEP = re.compile(r"step-(\d{8,15})")
# File names of this package: plain ones, in the folder itself or in the model's.
_FILE = re.compile(rf"(?:{MODEL_FOLDER}/)?[A-Za-z0-9_][A-Za-z0-9_.-]{{0,99}}")

Count = Annotated[int, msgspec.Meta(ge=0)]


class Damaged(Exception):
    """A checkpoint is incomplete or damaged. The message has the file and the fault, as a phrase for brackets."""


class Written(msgspec.Struct, frozen=True):
    """The size of a file in bytes, and its SHA-256 in hexadecimal digits."""

    bytes: Count
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """The list of a checkpoint's files. It is written last, so a checkpoint without one is half-written.

    run: equal in all checkpoints of a run, through its restarts. iteration: the last one that it contains.
    world_size: the number of ranks that saved it. is_best: whether it was the best of its run when it was written.
    files: by their names within the checkpoint's folder.
    """

    format: int
    run: str
    iteration: Count
    world_size: Annotated[int, msgspec.Meta(ge=1)]
    is_best: bool
    files: dict[str, Written]

    def text(self) -> str:
        """The manifest as JSON."""
        return json.dumps(msgspec.to_builtins(self), indent=1) + "\n"


def step_name(iteration: int) -> str:
    """The name of the folder of a checkpoint."""
    return f"step-{iteration:08d}"


def steps(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints in `folder`, complete or not, ordered by iteration, the last first. Clocks play no role."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            name = _STEP.fullmatch(entry.name)
            # Two ways to write one number would make two checkpoints of one iteration.
            if name and entry.is_dir(follow_symlinks=False) and entry.name == step_name(int(name[1])):
                found.append((int(name[1]), folder / entry.name))
    return sorted(found, reverse=True)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`, after checking that all files have the sizes listed in it.

    Raises Damaged. `check_digests` compares the files' contents.
    """
    value = read_json_inside(folder, MANIFEST)
    if isinstance(value, dict) and value.get("format") != FORMAT:
        raise Damaged(
            f"{MANIFEST} has the format {printable(value.get('format'), 40)}, and this program reads {FORMAT}"
        )
    try:
        manifest = msgspec.convert(value, Manifest)
    except msgspec.ValidationError as error:
        raise Damaged(f"{MANIFEST}: {printable(error, 200)}") from None
    for name in manifest.files:
        if not _FILE.fullmatch(name):
            raise Damaged(f"{MANIFEST} names {printable(name, 100)!r}, which is not a file of a checkpoint")
    if _STEP.fullmatch(folder.name) and folder.name != step_name(manifest.iteration):
        raise Damaged(f"{MANIFEST} belongs to iteration {printable(manifest.iteration, 40)}")
    if manifest.world_size > len(manifest.files):
        raise Damaged(f"{MANIFEST} has {printable(manifest.world_size, 40)} ranks and only {len(manifest.files)} files")
    for name in (MODEL, TRAINING, *(RANK.format(rank=rank) for rank in range(manifest.world_size))):
        if name not in manifest.files:
            raise Damaged(f"{MANIFEST} does not name {name}")
    for name, written in manifest.files.items():
        with open_inside(folder, name) as file:
            size = os.fstat(file.fileno()).st_size
        if size != written.bytes:
            raise Damaged(f"{name} has {size} bytes instead of {printable(written.bytes, 40)}")
    return manifest


def check_digests(folder: Path, manifest: Manifest) -> None:
    """Read every file and raise Damaged, with its name, for one whose digest differs from the manifest's."""
    for name, written in manifest.files.items():
        digest = hashlib.sha256()
        with open_inside(folder, name) as file:
            try:
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
            except OSError as error:
                raise Damaged(f"{name} cannot be read: {error.strerror}") from None
        if digest.hexdigest() != written.sha256:
            raise Damaged(f"the SHA-256 of {name} differs from the one in {MANIFEST}")


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
    """Open a plain file of a checkpoint for reading. Links out of the folder are refused. Raises Damaged."""
    path = folder / name
    try:
        if path.parent != folder and not stat.S_ISDIR(os.lstat(path.parent).st_mode):
            raise Damaged(f"{path.parent.name} is not a folder")
        return open_plain(path, "rb", follows=False)
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except OSError as error:
        raise Damaged(f"{name} cannot be opened: {error.strerror}") from None


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, (bytes,) uint8."""
    return tensor.reshape(-1).view(torch.uint8)


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], check: Callable[[], None]
) -> Written:
    """Write contiguous tensors on the host to `path`, and sync it to the disk. Other threads run meanwhile.

    `check` is called now and then, and may raise. Raises OSError, and ValueError for a dtype that the format lacks.
    """
    # The widest first, so that every tensor begins at a multiple of its elements' size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is of {tensor.dtype}, which a checkpoint cannot hold")
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    contents = (as_bytes(tensor).numpy().data for _, tensor in ordered)
    return write_bytes(path, len(text).to_bytes(8, "little"), text, *contents, check=check)


def write_bytes(path: Path, *contents: bytes | memoryview, check: Callable[[], None] = lambda: None) -> Written:
    """Write `contents`, one after the other, to a new file, and sync it to the disk. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        for content in contents:
            left = memoryview(content)
            while left:
                check()
                count = file.write(left[:CHUNK_BYTES])
                digest.update(left[:count])
                left, size = left[count:], size + count
        sync_to_disk(file.fileno())
    return Written(size, digest.hexdigest())
