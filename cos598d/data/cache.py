"""A cache of a task's prepared data, as named arrays in one file: built once for all processes, then memory-mapped."""

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
    """The arrays in the cache folder, or built: of a `kind`, by `name` and by `key`, their content key.

    If several processes ask at once, one builds and the others wait for its file. A damaged file is built again.
    `overwrite` builds again in any case, once for all processes that wait together. The result is memory-mapped from
    the file, so that processes on one machine share it. Raises UserError if the cache folder cannot be written, and
    whatever `build` raises.
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
        os.close(open_own(lock))  # the lock truncates it, so it must not be a link's target
        with FileLock(lock):
            # A process that waited for the lock finds the file that another process wrote in the meantime.
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
    """A digest of arrays and their names, dtypes and shapes."""
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

    in_order = {name: np.ascontiguousarray(array) for name, array in arrays.items()}  # a view may have another order
    content = save(in_order, metadata={"checksum": checksum(in_order)})
    with whole_file(file, "wb") as handle:
        handle.write(content)


def _read(file: Path) -> Arrays | None:
    """The arrays in the file, memory-mapped; None if it is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        open_plain(file, "rb").close()  # the library would wait for the writer of a pipe
        with safe_open(file, framework="pt") as stored:  # as torch tensors, since only those stay memory-mapped
            written = (stored.metadata() or {}).get("checksum")
            arrays = {name: stored.get_tensor(name).numpy() for name in stored.keys()}  # noqa: SIM118, no mapping
    except (OSError, SafetensorError):
        return None
    return arrays if written == checksum(arrays) else None
