"""Lesson 5: the ring all-reduce, made of messages between neighbours."""

from cos598d.tools.learn.lesson import Lesson

LESSON = Lesson(
    number=5,
    name="ring",
    title="the ring itself",
    minutes=60,
    question="Write the all-reduce that lessons 3 and 4 call: with messages between neighbours alone, 2(n-1) of them "
    "from each rank, each an n-th of the tensor.",
    contract={
        "all_reduce": "all_reduce(comm, tensor), which turns a tensor of one dimension into the sum over all ranks"
    },
    hints=(
        "Cut the tensor with tensor.tensor_split(n): n views, whose sizes differ by at most one element, so that none "
        "is left over. What you write into a view stands in the tensor.",
        "First half, step s = 0 ... n-2: send part (rank - s) % n to the right, receive part (rank - s - 1) % n from "
        "the left into a tensor of its own (torch.empty_like), and add it. Afterwards rank r holds the sum of part "
        "r+1.",
        "If all ranks send first and receive then, all wait for ever: a send ends when the other rank receives. "
        "Begin the send (sending = comm.isend(part, right)), receive, then sending.wait(). Second half, step s: "
        "send part (rank + 1 - s) % n, receive into part (rank - s) % n, and add nothing.",
    ),
    checks="lesson5",
    read="cos598d/sync/parts/ring.py, which cuts the parts further so that adding and sending overlap; then tree.py "
    "and halving_doubling.py in cos598d/sync, which need fewer steps.",
    measure="python -m cos598d bench --sync flat,ring,tree,halving_doubling --model tiny --world_size 4",
    ranks=(3, 2, 4),
)
