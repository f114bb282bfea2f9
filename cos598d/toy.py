"""Small models and batches for the claims about gradient syncs, and for a first look at a sync's cost and speed."""

import numpy as np
import torch
from torch import nn

WORDS, WIDTH = 12, 6


class ToyModel(nn.Module):
    """Small, and awkward in every way that real models are.

    A frozen layer; a weight tied into two places; a buffer that matters; a layer that nothing uses; one that only
    some examples use; a parameter of another dtype; one of more than 1 MiB, larger than DDP's first bucket.
    """

    def __init__(self):
        super().__init__()
        # Registered first, so expected last: a sync that overlaps has started all else when it finds this one missing.
        self.never = nn.Linear(WIDTH, WIDTH)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.large = nn.Parameter(torch.randn(300_000) * 0.01)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.precise = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.output = nn.Linear(WIDTH, WORDS, bias=False)
        self.output.weight = self.embedding.weight  # tied
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> tuple:
        """Word ids and mask (batch, sequence), labels (batch): the mean loss and the logits (batch, words)."""
        words = self.embedding(input_ids) * attention_mask.unsqueeze(-1)
        state = words.sum(dim=1) / attention_mask.sum(dim=1, keepdim=True)
        state = torch.tanh(self.hidden(self.frozen(state)) * self.scale + self.precise.float())
        state = state + self.large[: 6 * WIDTH].view(6, WIDTH).sum(dim=0)
        chosen = labels == 0
        if chosen.any():
            state = torch.where(chosen.unsqueeze(-1), torch.tanh(self.sometimes(state)), state)
        logits = self.output(state)
        return nn.functional.cross_entropy(logits, labels), logits


class ToyFeatures:
    """Random sentences of random length; the same on every rank."""

    def __init__(self, examples: int, seed: int = 0):
        generator = np.random.default_rng(seed)
        self.lengths = generator.integers(2, 9, examples).astype(np.int32)
        self.labels = generator.integers(0, WORDS // 3, examples)
        self._ids = [torch.from_numpy(generator.integers(0, WORDS, length)) for length in self.lengths]

    def __len__(self) -> int:
        return len(self.lengths)

    def collate(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """Padded to the longest of these examples."""
        ids = nn.utils.rnn.pad_sequence([self._ids[i] for i in indices], batch_first=True)
        mask = torch.arange(ids.shape[1]) < torch.from_numpy(self.lengths[indices]).unsqueeze(1)
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.from_numpy(self.labels[indices])}


def toy_model(seed: int) -> ToyModel:
    """A toy model with weights drawn from `seed`, the global generator left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ToyModel()


def local_batch(rank: int, step: int, with_first_label: bool = True) -> dict[str, torch.Tensor]:
    """Four sentences that only this rank sees in this step; without label 0 they leave `sometimes` unused."""
    batch = ToyFeatures(4, seed=1000 * step + rank).collate(np.arange(4))
    batch["labels"] = batch["labels"].clamp(min=0 if with_first_label else 1)
    if with_first_label:
        batch["labels"][0] = 0
    return batch


def plain_model(seed: int = 0) -> nn.Sequential:
    """Eight layers, 0.5 million parameters of one dtype, all of them used in every step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [layer for _ in range(7) for layer in (nn.Linear(256, 256), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(256, 251))


def plain_loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The loss of `plain_model` on 16 random examples that only this rank sees in this step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return module(torch.randn(16, 256, generator=generator)).square().mean()
