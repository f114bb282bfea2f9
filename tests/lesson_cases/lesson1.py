"""Lesson 1 as students write it: changes of the answer that are wrong, with what the check must print, and right files."""

from lesson_cases import all_wrong

SEED = 'f"{seed} {epoch}"'
NUMBERS = "    numbers = list(range(examples))\n"
SHUFFLE = f"    random.Random({SEED}).shuffle(numbers)\n"
SHARE = "    return batch[rank::world_size]\n"
WEIGHT = "    return world_size * len(share) / len(batch)\n"
TURNED = f"""    k = random.Random({SEED}).randrange(1, examples)
    numbers = numbers[k:] + numbers[:k]
"""
DOUBLES = """    draw = random.Random(seed * 100 + epoch)
    numbers = [draw.randrange(examples) for _ in range(examples)]
"""
CUT = "    size = {size}\n    return batch[rank * size : (rank + 1) * size]\n"

WRONG = all_wrong(1, {
    "right for one process alone": ("lesson1.py.txt", "order differs from rank to rank"),
    "shuffled by the process's generator": ([(f"random.Random({SEED})", "random")], "order differs from rank to rank"),
    "seeded by the hash of a text": ([(SEED, f"hash({SEED})")], "without hash() of a text"),
    "the order of a set": (
        [(SHUFFLE, '    numbers = [int(text.split()[0]) for text in {f"{n} {seed} {epoch}" for n in numbers}]\n')],
        "order differs from rank to rank",
    ),
    "not shuffled": ([(SHUFFLE, "")], "order does not shuffle"),
    "the epoch is forgotten": ([(SEED, "seed")], "every epoch has the same"),
    "the seed is forgotten": ([(SEED, "epoch")], "give the same order in epoch 0"),
    "the first epoch alone differs": ([(SEED, "seed + (epoch > 0)")], "epochs 1 and 2 have the same order"),
    "turned round": ([(SHUFFLE, TURNED)], "order hardly shuffles: 52 of its 52 steps from one number to the next are 1"),
    "one shuffle, turned round": ([(SEED, "seed"), ("    return numbers\n", "    return numbers[epoch:] + numbers[:epoch]\n")], "every epoch has the same order"),
    "numbers that nobody has": ([(SHARE, "    return [10**30] if rank else []\n")], "which is not in the batch"),
    "a share without an end": (
        [("import random\n", "import itertools\nimport random\n"), (SHARE, "    return itertools.cycle(batch)\n"), (WEIGHT, "    return 1.0\n")],
        "share returned more than 12 numbers",
    ),
    "drawn with doubles": ([(NUMBERS, DOUBLES), (SHUFFLE, "")], "expected every number from 0 to 52 once"),
    "the remainder is dropped": ([(SHARE, CUT.format(size="len(batch) // world_size"))], "are in no rank's share"),
    "the whole batch for all": ([(SHARE, "    return batch\n")], "is in the shares of ranks 0 and 1"),
    "places instead of examples": ([(SHARE, "    return list(range(rank, len(batch), world_size))\n")], "return examples, not their indices"),
    "rounded up": ([(SHARE, CUT.format(size="-(-len(batch) // world_size)"))], "they may differ by one at most", (4,)),
    "no weight": ([(WEIGHT, "    return 1.0\n")], "every rank counts the same"),
    "weight for a sum": ([(WEIGHT, "    return len(share) / len(batch)\n")], "right if the ranks' gradients were added up"),
    "divides by an empty share": ([(WEIGHT, "    return world_size / len(batch) / (1 / len(share))  #!\n")], "ZeroDivisionError", (3,)),
})  # fmt: skip

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
