"""A small transformer with optional awkward parts, and its batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cos598d.tools.exam.models import seeded

WORDS, TOKENS = 23, 6
GAIN = 4.0  # of the loss, so that gradients are not small compared with weights


@dataclass(frozen=True)
class Parts:
    """The model's parts in addition to its embedding, its layers and its output.

    is_tied: the output's weight is the embedding's. is_used_twice: a layer that is called before and after the others.
    has_unused: a layer that is never called. has_rarely_used: one that is called for some examples only.
    has_frozen: a layer between the others that does not train. has_small: parameters of one and of three elements.
    has_buffer: a buffer that the forward reads, and that does not change. has_statistics: one that each rank's own
        examples change. is_double: float64 throughout.
    """

    is_tied: bool = False
    is_used_twice: bool = False
    has_unused: bool = False
    has_rarely_used: bool = False
    has_frozen: bool = False
    has_small: bool = False
    has_buffer: bool = False
    has_statistics: bool = False
    is_double: bool = False
    width: int = 8

    @property
    def may_be_unused(self) -> bool:
        """Whether a step may leave a parameter without a gradient on some rank."""
        return self.has_unused or self.has_rarely_used


class TransformerLayer(nn.Module):
    """A layer of a transformer: attention, then two linear layers, each with a residual connection."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)  # softmax would cancel a bias
        self.wide, self.narrow = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width), for input and output."""
        normed = self.norm(state)
        scores = self.query(normed) @ self.key(normed).transpose(1, 2)
        state = state + scores.softmax(dim=-1) @ self.value(normed)
        return state + self.narrow(torch.tanh(self.wide(state)))


class ProofModel(nn.Module):
    """Classifies a sentence by one of its words. Every element of used parameters has a gradient."""

    shift: torch.Tensor | None
    seen: torch.Tensor | None

    def __init__(self, parts: Parts):
        super().__init__()
        width = parts.width
        if parts.has_unused:
            self.unused = nn.Linear(width, width)
        self.embedding = nn.Embedding(WORDS, width)
        nn.init.normal_(self.embedding.weight, std=0.3)  # as an output's weight, a larger one makes training diverge
        self.frozen = nn.Linear(width, width).requires_grad_(False) if parts.has_frozen else None
        self.twice = nn.Linear(width, width) if parts.is_used_twice else None
        self.layers = nn.ModuleList(TransformerLayer(width) for _ in range(2))
        if parts.has_small:
            self.one = nn.Parameter(torch.rand(1) + 0.5)
            self.three = nn.Parameter(torch.rand(3))
        self.has_small = parts.has_small
        self.rarely = nn.Linear(width, width) if parts.has_rarely_used else None
        self.output = nn.Linear(width, WORDS)
        if parts.is_tied:
            self.output.weight = self.embedding.weight
        self.register_buffer("shift", torch.randn(width) if parts.has_buffer else None)
        self.register_buffer("seen", torch.zeros(width) if parts.has_statistics else None)
        if parts.is_double:
            self.double()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, is_rare: torch.Tensor) -> torch.Tensor:
        """(batch, tokens) and twice (batch,): the mean of the examples' losses; of none it is zero."""
        state = self.embedding(input_ids)
        if self.seen is not None:
            self.seen += state.detach().sum(dim=(0, 1))
        if self.shift is not None:
            state = state + self.shift
        if self.frozen is not None:
            state = state + self.frozen(state)
        if self.twice is not None:
            state = state + torch.tanh(self.twice(state))
        for layer in self.layers:
            state = layer(state)
        if self.has_small:
            state = state * self.one + nn.functional.pad(self.three, (0, state.shape[-1] - 3))
        if self.twice is not None:
            state = state + torch.tanh(self.twice(state))
        state = state.mean(dim=1)
        if self.rarely is not None and is_rare.any():
            state = torch.where(is_rare.unsqueeze(-1), state + torch.tanh(self.rarely(state)), state)
        logits = self.output(state)
        precise = logits if logits.dtype == torch.float64 else logits.float()
        losses = nn.functional.cross_entropy(precise, labels, reduction="sum")
        return GAIN * losses / max(1, len(labels))


def proof_model(seed: int, parts: Parts) -> ProofModel:
    """A model with weights drawn from `seed`."""
    return seeded(seed, lambda: ProofModel(parts))


class Examples:
    """The examples of a training's steps, one global batch after another; the same on every rank.

    In the first batch the last example is rare, in the second the first one, in later ones none. So the layer for rare
    ones is used only on the last rank, then only on the first, then nowhere.
    """

    def __init__(self, batch_sizes: Sequence[int], seed: int):
        generator = torch.Generator().manual_seed(seed)
        self._batches = []
        for step, size in enumerate(batch_sizes):
            is_rare = torch.zeros(size, dtype=torch.bool)
            if step < 2:
                is_rare[-1 if step == 0 else 0] = True
            ids = torch.randint(0, WORDS, (size, TOKENS), generator=generator)
            self._batches.append((ids, torch.randint(0, WORDS, (size,), generator=generator), is_rare))

    def shares(self, step: int, micro_batches: int, rank: int, ranks: int) -> list[tuple[dict[str, Any], float]]:
        """A rank's share of each micro-batch of a step, as the model's arguments, and what its mean loss counts for."""
        found = []
        size = len(self._batches[step][0])
        for part in torch.arange(size).chunk(micro_batches):
            own = part.tensor_split(ranks)[rank]
            ids, labels, is_rare = (each[own] for each in self._batches[step])
            found.append(({"input_ids": ids, "labels": labels, "is_rare": is_rare}, len(own) / size))
        return found
