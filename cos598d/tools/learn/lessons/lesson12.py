"""Lesson 12: ranks that train by themselves, and agree on their weights now and then."""

from cos598d.tools.learn.lesson import Lesson

LESSON = Lesson(
    number=12,
    name="talk_less",
    title="talk less",
    minutes=40,
    question="Let each rank train by itself for some steps, and agree on new weights only then, by an outer step with "
    "momentum. One call in H steps: how near does the loss come to that of averaging in every step?",
    contract={
        "LocalSGD": "LocalSGD(comm, model, every, outer_rate, outer_momentum), whose after_step() comes after each step"
    },
    hints=(
        "Keep two flat tensors: what the ranks agreed on (at first a copy of the weights) and the momentum (at first "
        "zeros). torch.cat([p.data.flatten() for p in weights]) makes a new tensor, so it is a copy.",
        "In after_step count first. In a round: all-reduce the flat weights, divide by comm.world_size, and do the "
        "three lines of the formula with this average.",
        "Put what was agreed on back: for p, part in zip(weights, agreed.split([p.numel() for p in weights])): "
        "p.data.copy_(part.view_as(p)). Without p.data autograd would complain.",
    ),
    checks="lesson12",
    read="cos598d/sync/local_sgd.py, then cos598d/sync/diloco.py, which does not even wait for its rounds.",
    measure="python -m cos598d train --sync local_sgd --sync_every 4 --world_size 2 --max_steps 8",
    ranks=(3, 2),
)
