"""Lesson 1: one global batch, cut into shares."""

from cos598d.tools.learn.lesson import Lesson

LESSON = Lesson(
    number=1,
    name="shares",
    title="one batch, n shares",
    minutes=40,
    question="Every rank computes a share of the same global batch. Who takes which examples, and how much does each "
    "rank's loss count when the shares are not equally large?",
    contract={
        "order": "order(examples, seed, epoch), a shuffled list of 0 ... examples-1, the same on every rank",
        "share": "share(batch, rank, world_size), this rank's part of a list of examples",
        "weight": "weight(share, batch, world_size), what this rank's mean loss is multiplied by",
    },
    hints=(
        "Every rank calls order() by itself, and nobody tells the others what came out. So the shuffling must depend "
        "on seed and epoch alone: random.Random(f'{seed} {epoch}').shuffle(numbers), not the process's own generator.",
        "batch[rank::world_size] gives parts whose sizes differ by at most one, and leaves nothing out.",
        "The ranks' gradients are averaged: their sum is divided by n. For the mean over all examples of the batch "
        "each example must count 1/len(batch) in the end. In its rank's mean loss it counts 1/len(share), and the "
        "average makes that 1/(n len(share)): what must the loss be multiplied by?",
    ),
    checks="lesson1",
    read="cos598d/data/sampler.py, which has the three of them and cuts a share further by length.",
    measure="python benchmarks/parity.py --runs_dir runs/parity",
    ranks=(2, 3, 4),
)
