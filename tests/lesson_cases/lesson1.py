"""Lesson 1: one batch, n shares."""

from lesson_cases.changes import of_the_book

ORDER = """import random

def order(examples, seed, epoch):
    numbers = list(range(examples))
    random.Random(f"{seed} {epoch}").shuffle(numbers)
    return numbers

"""
SHARE = """def share(batch, rank, world_size):
    return batch[rank::world_size]

"""
WEIGHT = """def weight(share, batch, world_size):
    return world_size * len(share) / len(batch)
"""
RIGHT = {
    "numpy": """import numpy as np

def order(examples, seed, epoch):
    return np.random.default_rng((seed, epoch)).permutation(examples)

def share(batch, rank, world_size):
    return np.array_split(batch, world_size)[rank]

def weight(share, batch, world_size):
    return np.float64(len(share)) / (len(batch) / world_size)
""",
    "torch, slices": """import torch

def order(examples, seed, epoch):
    return torch.randperm(examples, generator=torch.Generator().manual_seed(1000 * seed + epoch)).tolist()

def share(batch, rank, world_size):
    return batch[rank * len(batch) // world_size : (rank + 1) * len(batch) // world_size]

def weight(share, batch, world_size):
    fair = len(batch) / world_size
    return len(share) / fair if share else 0
""",
}
WRONG = {
    "right for one process alone": (of_the_book("lesson1.py.txt"), "order differs from rank to rank"),
    "shuffled by the process's generator": (
        """import random

def order(examples, seed, epoch):
    numbers = list(range(examples))
    random.shuffle(numbers)
    return numbers

"""
        + SHARE
        + WEIGHT,
        "order differs from rank to rank",
    ),
    "seeded by the hash of a text": (
        ORDER.replace('f"{seed} {epoch}"', 'hash(f"{seed} {epoch}")') + SHARE + WEIGHT,
        "without hash() of a text",
    ),
    "the order of a set": (
        ORDER.replace(
            'random.Random(f"{seed} {epoch}").shuffle(numbers)\n',
            'numbers = [int(text.split()[0]) for text in {f"{n} {seed} {epoch}" for n in numbers}]\n',
        )
        + SHARE
        + WEIGHT,
        "order differs from rank to rank",
    ),
    "not shuffled": (
        "def order(examples, seed, epoch):\n    return list(range(examples))\n\n" + SHARE + WEIGHT,
        "order does not shuffle",
    ),
    "the epoch is forgotten": (ORDER.replace('f"{seed} {epoch}"', "seed") + SHARE + WEIGHT, "every epoch has the same"),
    "the seed is forgotten": (
        ORDER.replace('f"{seed} {epoch}"', "epoch") + SHARE + WEIGHT,
        "give the same order in epoch 0",
    ),
    "the first epoch alone differs": (
        ORDER.replace('f"{seed} {epoch}"', "seed + (epoch > 0)") + SHARE + WEIGHT,
        "epochs 1 and 2 have the same order",
    ),
    "turned round": (
        ORDER.replace(
            'random.Random(f"{seed} {epoch}").shuffle(numbers)\n',
            'k = random.Random(f"{seed} {epoch}").randrange(1, examples)\n    numbers = numbers[k:] + numbers[:k]\n',
        )
        + SHARE
        + WEIGHT,
        "order hardly shuffles: 52 of its 52 steps from one number to the next are 1",
    ),
    "one shuffle, turned round": (
        ORDER.replace(
            'random.Random(f"{seed} {epoch}").shuffle(numbers)\n',
            "random.Random(seed).shuffle(numbers)\n    numbers = numbers[epoch:] + numbers[:epoch]\n",
        )
        + SHARE
        + WEIGHT,
        "every epoch has the same order",
    ),
    "numbers that nobody has": (
        ORDER + "def share(batch, rank, world_size):\n    return [10**30] if rank else []\n\n" + WEIGHT,
        "which is not in the batch",
    ),
    "a share without an end": (
        ORDER
        + "import itertools\n\ndef share(batch, rank, world_size):\n    return itertools.cycle(batch)\n\n"
        + "def weight(share, batch, world_size):\n    return 1.0\n",
        "share returned more than 12 numbers",
    ),
    "drawn with doubles": (
        """import random

def order(examples, seed, epoch):
    draw = random.Random(seed * 100 + epoch)
    return [draw.randrange(examples) for _ in range(examples)]

"""
        + SHARE
        + WEIGHT,
        "expected every number from 0 to 52 once",
    ),
    "the remainder is dropped": (
        ORDER
        + """def share(batch, rank, world_size):
    size = len(batch) // world_size
    return batch[rank * size : (rank + 1) * size]

"""
        + WEIGHT,
        "are in no rank's share",
    ),
    "the whole batch for all": (
        ORDER + "def share(batch, rank, world_size):\n    return batch\n\n" + WEIGHT,
        "is in the shares of ranks 0 and 1",
    ),
    "places instead of examples": (
        ORDER
        + "def share(batch, rank, world_size):\n    return list(range(rank, len(batch), world_size))\n\n"
        + WEIGHT,
        "it has examples, not places",
    ),
    "rounded up": (
        ORDER
        + """def share(batch, rank, world_size):
    size = -(-len(batch) // world_size)
    return batch[rank * size : (rank + 1) * size]

"""
        + WEIGHT,
        "they may differ by one at most",
        (4,),
    ),
    "no weight": (
        ORDER + SHARE + "def weight(share, batch, world_size):\n    return 1.0\n",
        "every rank counts the same",
    ),
    "weight for a sum": (
        ORDER + SHARE + "def weight(share, batch, world_size):\n    return len(share) / len(batch)\n",
        "right if the ranks' gradients were added up",
    ),
    "divides by an empty share": (
        ORDER
        + SHARE
        + "def weight(share, batch, world_size):\n    return world_size / len(batch) / (1 / len(share))  #!\n",
        "ZeroDivisionError",
        (3,),
    ),
}
