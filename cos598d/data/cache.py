"""A cache of encoded texts: arrays in one safetensors file, made once for all processes of a host."""

import hashlib
import time
from collections.abc import Callable, Iterable

import numpy as np
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from cos598d.errors import UserError
from cos598d.terminal.files import cache_folder

Arrays = dict[str, np.ndarray]


def cached(name: str, key: Iterable[str], build: Callable[[], Arrays], overwrite: bool) -> Arrays:
    """The arrays that `build` makes from what the `key` names, from the cache if they are there.

    If several processes ask at once, one builds and the others wait. A damaged file is built again; `overwrite` builds
    again in any case. Raises UserError if the cache cannot be written.
    """
    digest, began = hashlib.sha256(), time.time()
    for part in key:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    file = cache_folder() / "features" / f"{name}-{digest.hexdigest()[:32]}.safetensors"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_suffix(".lock")):
            if file.exists() and (not overwrite or file.stat().st_mtime > began):
                try:
                    return load_file(file)
                except SafetensorError:
                    pass
            arrays = {part: np.ascontiguousarray(array) for part, array in build().items()}
            save_file(arrays, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)
            return arrays
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error}). Set COS598D_CACHE to a folder that can.") from error
