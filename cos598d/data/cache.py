"""What was made of a task's data, as named arrays in one file: built once however many processes ask, then mapped."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from cos598d.errors import UserError
from cos598d.terminal.files import cache_folder, open_own, whole_file
from cos598d.terminal.reading import open_plain

Arrays = dict[str, np.ndarray]


def cached_arrays(
    kind: str, name: str, key: Sequence[str], build: Callable[[], Arrays], overwrite: bool = False
) -> Arrays:
    """The arrays kept in the cache folder, among others of a `kind`, by `name` and the content `key`, or built.

    However many processes ask at the same moment, one builds and the others wait for its file; a file that is
    damaged is built again. `overwrite` builds again even so, once for all processes that wait together.
    What is returned is mapped from the file, so that processes on one machine share its memory.
    Raises UserError if the cache folder cannot be written, and whatever `build` raises.
    """
    from filelock import FileLock

    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:32]
    file = cache_folder() / kind / f"{name}-{digest}.safetensors"
    before = _identity(file)
    if before and not overwrite and (kept := _read(file)) is not None:
        return kept
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.with_suffix(".lock")
        os.close(open_own(lock))  # which the lock empties: never what a link there leads to
        with FileLock(lock):
            # Whoever waited for the lock finds the file that another process wrote in the meantime.
            kept = _read(file) if _identity(file) != before else None
            if kept is None:
                _write(file, build())
                kept = _read(file)
    except OSError as error:
        raise UserError(
            f"{kind.capitalize()} cannot be kept in {file.parent} ({error.strerror or error}). "
            "Set COS598D_CACHE to a folder that can be written."
        ) from error
    if kept is None:
        raise UserError(f"What was written to {file} cannot be read back. Check that disk, or set COS598D_CACHE.")
    return kept


def checksum(arrays: Mapping[str, np.ndarray]) -> str:
    """A digest of arrays and their names, types and shapes."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype.str} {arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def _identity(file: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        state = file.stat()
        return state.st_ino, state.st_mtime_ns
    return None


def _write(file: Path, arrays: Arrays) -> None:
    from safetensors.numpy import save

    in_order = {name: np.ascontiguousarray(array) for name, array in arrays.items()}  # what is a view has another order
    content = save(in_order, metadata={"checksum": checksum(in_order)})
    with whole_file(file, "wb") as handle:
        handle.write(content)


def _read(file: Path) -> Arrays | None:
    """The arrays in the file, mapped, or None if it is missing or damaged in any way."""
    from safetensors import SafetensorError, safe_open

    try:
        open_plain(file, "rb").close()  # the library would wait for whoever writes to a pipe
        with safe_open(file, framework="pt") as stored:  # as torch tensors, since only those stay in the file
            written = (stored.metadata() or {}).get("checksum")
            arrays = {name: stored.get_tensor(name).numpy() for name in stored.keys()}  # noqa: SIM118, no mapping
    except (OSError, SafetensorError):
        return None
    return arrays if written == checksum(arrays) else None
