"""Values between a rank and its judge, as JSON and safetensors: nothing from a rank is unpickled."""

import json
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save


def pack(value: Any) -> bytes:
    """Numbers (numpy's too), texts, None, lists, dictionaries and tensors as bytes. Raises TypeError for others."""
    tensors: dict[str, torch.Tensor] = {}

    def walk(each: Any) -> Any:
        if isinstance(each, torch.Tensor):
            tensors[str(len(tensors))] = each.detach().to_dense().clone().contiguous()
            return {"tensor": str(len(tensors) - 1)}
        if isinstance(each, np.generic):
            return each.item()
        if isinstance(each, dict):
            return {"items": [[key, walk(item)] for key, item in each.items()]}
        return [walk(item) for item in each] if isinstance(each, list | tuple) else each

    return save(tensors, metadata={"value": json.dumps(walk(value))})


def unpack(data: bytes) -> Any:
    """The value in `pack`'s bytes. Tuples have become lists."""
    tensors = load(data)
    length = int.from_bytes(data[:8], "little")

    def walk(each: Any) -> Any:
        if isinstance(each, dict):
            return tensors[each["tensor"]] if "tensor" in each else {key: walk(item) for key, item in each["items"]}
        return [walk(item) for item in each] if isinstance(each, list) else each

    return walk(json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["value"]))
