"""Linear sketches: 32 random-sign sums that stand for a tensor, so that what holds for tensors holds for them.

The sketch of a sum is the sum of the sketches, and that of a multiple the multiple. So a gradient that was applied can
be compared with any combination of the gradients that the ranks computed, from 32 numbers of each.
"""

import base64
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

SIZE = 32
_CHUNK = 4096  # elements that share a matrix of signs
_BLOCK = 1024  # chunks whose own signs are drawn together
_SEED = 598
_SMALL = 1 << 16  # so many elements are summed in float64, for next to nothing


class Sketcher:
    """Sketches of tensors. The signs are the same on every rank: drawn by a generator of their own, so that no random
    state of the script's changes."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._signs: dict[Any, torch.Tensor] = {}
        self._of_chunks: dict[Any, torch.Tensor] = {}

    def __call__(self, tensor: "torch.Tensor") -> np.ndarray:
        """The SIZE sums of a tensor of any shape (float64). A sparse one counts as its dense form."""
        torch = self._torch
        with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
            flat = tensor.detach()
            if flat.layout is not torch.strided:
                flat = flat.to_dense()
            if flat.is_complex():
                flat = torch.view_as_real(flat)
            flat = flat.reshape(-1)
            is_exact = flat.numel() <= _SMALL or flat.dtype is torch.float64
            # A product of float32 matrices that may be rounded to fewer digits is no sum of signs.
            is_rounded = torch.get_float32_matmul_precision() != "highest"
            dtype = torch.float64 if is_exact or is_rounded else torch.float32
            whole = flat.numel() // _CHUNK
            signs = self._signs_of(flat.device, dtype)
            rest = flat[whole * _CHUNK :].to(torch.float64)
            sums = rest @ self._signs_of(flat.device, torch.float64)[: len(rest)]
            sums = sums * self._chunk_signs(flat.device, whole + 1)[whole]
            if whole:
                by_chunk = flat[: whole * _CHUNK].view(whole, _CHUNK).to(dtype) @ signs
                sums += (by_chunk.to(torch.float64) * self._chunk_signs(flat.device, whole)).sum(0)
            return sums.cpu().numpy()

    def _signs_of(self, device: Any, dtype: Any) -> "torch.Tensor":
        if (device, dtype) not in self._signs:
            drawn = self._draw(_CHUNK, _SEED)
            self._signs[device, dtype] = drawn.to(device, dtype)
        return self._signs[device, dtype]

    def _chunk_signs(self, device: Any, count: int) -> "torch.Tensor":
        known = self._of_chunks.get(device)
        if known is None or len(known) < count:
            blocks = [self._draw(_BLOCK, _SEED + 1 + block) for block in range(-(-count // _BLOCK))]
            known = self._of_chunks[device] = self._torch.cat(blocks).to(device, self._torch.float64)
        return known[:count]

    def _draw(self, rows: int, seed: int) -> "torch.Tensor":
        torch = self._torch
        generator = torch.Generator(device="cpu")
        generator.manual_seed(seed)
        return torch.randint(0, 2, (rows, SIZE), generator=generator, dtype=torch.int8, device="cpu") * 2 - 1


def to_text(sketch: np.ndarray) -> str:
    """A sketch as text for JSON: base64 of float32."""
    with np.errstate(over="ignore"):
        return base64.b64encode(np.asarray(sketch, "<f4").tobytes()).decode()


def from_text(text: str) -> np.ndarray:
    """The sketch in a text (float64). Raises ValueError for another text."""
    found = np.frombuffer(base64.b64decode(text, validate=True), "<f4")
    if len(found) != SIZE:
        raise ValueError("it is no sketch")
    return found.astype(np.float64)
