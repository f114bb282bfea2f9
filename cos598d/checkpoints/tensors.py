"""Named tensors on the disk as safetensors files: written in one pass that hashes too, and read one at a time.

The library's own writer would leave files that only their owner may read, and would turn a full disk into words. The
format: 8 bytes with the length of the header, the header as JSON, and the tensors' bytes in the order that it says
(https://huggingface.co/docs/safetensors). They are read by the library.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from cos598d.checkpoints.layout import CHUNK_BYTES, Written
from cos598d.terminal.files import sync_to_disk

Check = Callable[[], None]
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


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as (bytes,) of uint8."""
    return tensor.reshape(-1).view(torch.uint8)


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], check: Check = lambda: None
) -> Written:
    """Write contiguous tensors on the host to `path`, and to the disk. Other threads run on meanwhile.

    `check` is called now and then, and may raise. Raises OSError, and ValueError for a dtype that the format has no
    name for.
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


def write_bytes(path: Path, *contents: bytes | memoryview, check: Check = lambda: None) -> Written:
    """Write the memory of `contents`, one after the other, to a new file and to the disk. Raises OSError.

    `check` is called now and then, and may raise.
    """
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
