"""Small models and batches that are awkward in every way that real ones are, and the gradients of one process."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import nn

WORDS, WIDTH = 41, 7
Gradients = Mapping[str, torch.Tensor | None]
Made = TypeVar("Made")


@dataclass(frozen=True)
class Shape:
    """The composition of a toy model.

    large, larger: elements of its two long tensors, primes so that no chunking divides them.
    is_tied: whether the output layer's weight is the embedding's; otherwise it is a separate, frozen one.
    more_frozen: elements of one more frozen tensor. all_used: whether nothing that can be left unused is trainable.
    shares_gradients: whether autograd gives two tensors' gradients the same memory, and needs it for a third's.
    """

    large: int = 1_009
    larger: int = 2_003
    is_tied: bool = True
    more_frozen: int = 0
    all_used: bool = False
    shares_gradients: bool = False


SMALL = Shape()
# More than 1 MiB, DDP's first bucket, and more than 2 MiB, which gloo and our messages send at a time.
LARGE = Shape(large=300_007, larger=600_011)


class ToyModel(nn.Module):
    """Small, and awkward in every way that real models are.

    A frozen layer; a tied weight; a buffer that matters; a layer that nothing uses; one that only some examples use; a
    parameter of another dtype; two long ones. Every element of used parameters has a nonzero gradient, a different one
    for every example.
    """

    def __init__(self, shape: Shape = SMALL):
        super().__init__()
        # Registered first, so expected last: an overlapping sync has started everything else when it finds this one
        # missing.
        self.never = nn.Linear(WIDTH, WIDTH)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.large = nn.Parameter(torch.randn(shape.large) * 0.01)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.precise = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.larger = nn.Parameter(torch.randn(shape.larger) * 0.01)
        if shape.shares_gradients:
            self.twin, self.below = (nn.Parameter(torch.randn(shape.large) * 0.01) for _ in range(2))
        self.shares_gradients = shape.shares_gradients
        self.last = nn.Linear(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)
        if shape.is_tied:
            self.output.weight = self.embedding.weight
        else:
            self.output.weight.requires_grad_(False)
        if shape.more_frozen:
            self.more_frozen = nn.Parameter(torch.randn(shape.more_frozen), requires_grad=False)
        if shape.all_used:
            self.never.requires_grad_(False)
            self.sometimes.requires_grad_(False)
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> tuple:
        """Word ids and mask (batch, sequence), labels (batch): the mean loss and the logits (batch, words)."""
        words = self.embedding(input_ids) * attention_mask.unsqueeze(-1)
        state = words.sum(dim=1) / attention_mask.sum(dim=1, keepdim=True)
        state = torch.tanh(self.hidden(self.frozen(state)) * self.scale + self.precise.float())
        chosen = labels == 0
        if chosen.any():
            state = torch.where(chosen.unsqueeze(-1), torch.tanh(self.sometimes(state)), state)
        logits = self.output(self.last(state))
        loss = nn.functional.cross_entropy(logits, labels)
        places = torch.arange(1, input_ids.shape[1] + 1)
        keys = (input_ids * attention_mask * places).sum(dim=1).tolist()
        large: torch.Tensor = self.large
        # a sum passes its own gradient on, and a view of that is another tensor in its memory
        if self.shares_gradients:
            large = (torch.tanh(self.below).view(-1, 1) + large.view(-1, 1) + self.twin.view(-1, 1)).view(-1)
        for tensor in (large, self.larger):
            loss = loss + 0.1 * (tensor * _pattern(tensor.numel(), keys)).sum()
        return loss, logits


def _pattern(elements: int, keys: Sequence[int]) -> torch.Tensor:
    """Numbers between 0.5 and 1.5, (elements,): the mean over the examples, each with its own by its key."""
    numbers = _numbers(elements)
    starts = [key * 7919 % elements for key in keys]
    return torch.stack([numbers[start : start + elements] for start in starts]).mean(dim=0)


@functools.lru_cache(maxsize=8)
def _numbers(elements: int) -> torch.Tensor:
    """`elements` random numbers between 0.5 and 1.5, twice in a row, the same in every process."""
    return (torch.rand(elements, generator=torch.Generator().manual_seed(0)) + 0.5).repeat(2)


def seeded(seed: int, make: Callable[[], Made]) -> Made:
    """What `make` makes, such as a model, if torch draws from `seed`. The global generator does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def toy_model(seed: int, shape: Shape = SMALL) -> ToyModel:
    """A toy model with weights drawn from `seed`."""
    return seeded(seed, lambda: ToyModel(shape))


def local_batch(rank: int, step: int, with_first_label: bool = True, seed: int = 0) -> dict[str, torch.Tensor]:
    """Four sentences that only this rank has in this step; without label 0 they leave `sometimes` unused."""
    generator = np.random.default_rng((seed, step, rank))
    lengths = torch.from_numpy(generator.integers(2, 9, 4))
    longest = int(lengths.max())
    words = torch.from_numpy(generator.integers(1, WORDS, (4, longest)))
    mask = (torch.arange(longest) < lengths[:, None]).long()
    labels = torch.from_numpy(generator.integers(0 if with_first_label else 1, WORDS // 3, 4))
    if with_first_label:
        labels[0] = 0
    return {"input_ids": words * mask, "attention_mask": mask, "labels": labels}


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Copies of a model's gradients by name; None for a parameter without one."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


@functools.lru_cache(maxsize=256)
def own_gradients(seed: int, rank: int, step: int, shape: Shape, with_first_label: bool = True) -> Gradients:
    """The gradients that one rank's batch gives in one step, by one process."""
    model = toy_model(seed, shape)
    model(**local_batch(rank, step, with_first_label, seed))[0].backward()
    return gradients_of(model)


def plain_model(seed: int = 0) -> nn.Sequential:
    """Eight layers, 0.5 million parameters of one dtype, all of them used in every step."""

    def made() -> nn.Sequential:
        layers = [layer for _ in range(7) for layer in (nn.Linear(256, 256), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(256, 251))

    return seeded(seed, made)


def plain_loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The loss of `plain_model` on 16 random examples that only this rank has in this step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return module(torch.randn(16, 256, generator=generator)).square().mean()
