"""A small transformer with awkward parts, and its batches."""

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
    """What a model has or not.

    has_unused: a layer that is never called. has_rarely_used: one that is called for some examples only. is_double:
    float64 throughout.
    """

    has_unused: bool = False
    has_rarely_used: bool = False
    is_double: bool = False
    width: int = 8

    @property
    def may_be_unused(self) -> bool:
        """Whether a step may leave a parameter without a gradient on some rank."""
        return self.has_unused or self.has_rarely_used


class TransformerLayer(nn.Module):
    """A layer of a transformer: attention, then two linear layers, each with dropout and a residual connection."""

    def __init__(self, width: int, dropout: float = 0.0):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)  # softmax would cancel a bias
        self.wide, self.narrow = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width), for input and output."""
        normed = self.norm(state)
        scores = self.query(normed) @ self.key(normed).transpose(1, 2)
        state = state + self.dropout(scores.softmax(dim=-1) @ self.value(normed))
        return state + self.dropout(self.narrow(torch.tanh(self.wide(state))))


class ProofModel(nn.Module):
    """Classifies a sentence by one of its words. Every element of used parameters has a gradient.

    The output's weight is the embedding's. A layer between the others does not train, one is called twice. There are
    parameters of one and of three elements, a buffer that does not change, and one that a rank's own examples change.
    """

    shift: torch.Tensor
    seen: torch.Tensor

    def __init__(self, parts: Parts):
        super().__init__()
        width = parts.width
        if parts.has_unused:
            self.unused = nn.Linear(width, width)
        self.embedding = nn.Embedding(WORDS, width)
        nn.init.normal_(self.embedding.weight, std=0.3)  # as an output's weight, a larger one makes training diverge
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.twice = nn.Linear(width, width)
        self.layers = nn.ModuleList(TransformerLayer(width) for _ in range(2))
        self.one = nn.Parameter(torch.rand(1) + 0.5)
        self.three = nn.Parameter(torch.rand(3))
        self.rarely = nn.Linear(width, width) if parts.has_rarely_used else None
        self.output = nn.Linear(width, WORDS)
        self.output.weight = self.embedding.weight
        self.register_buffer("shift", torch.randn(width))
        self.register_buffer("seen", torch.zeros(width))
        if parts.is_double:
            self.double()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, is_rare: torch.Tensor) -> torch.Tensor:
        """(batch, tokens) and twice (batch,): the mean of the examples' losses; of none it is zero."""
        state = self.embedding(input_ids)
        self.seen += state.detach().sum(dim=(0, 1))
        state = state + self.shift
        state = state + self.frozen(state)
        state = state + torch.tanh(self.twice(state))
        for layer in self.layers:
            state = layer(state)
        state = state * self.one + nn.functional.pad(self.three, (0, state.shape[-1] - 3))
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
