"""Lesson 3: the average by an all-reduce for each gradient, as task 2(b) makes it."""

from cos598d.tools.learn.lesson import Lesson

LESSON = Lesson(
    number=3,
    name="all_reduce",
    title="all-reduce",
    minutes=20,
    question="Average without a rank in the middle: an all-reduce leaves the sum over all ranks on every one of them. "
    "How many bytes does each rank send, and how does that grow with the number of ranks?",
    contract={"average": "average(comm, gradient, name), which turns gradient into the mean over all ranks, in place"},
    hints=(
        "comm.all_reduce(gradient, name) works in place: when it returns, gradient holds the sum over all ranks.",
        "The sum is not the mean. comm.world_size is the number of ranks, whatever it is today.",
        "In-place division is gradient /= comm.world_size; gradient = gradient / comm.world_size makes a tensor that "
        "nobody outside your function sees.",
    ),
    checks="lesson3",
    read="cos598d/sync/all_reduce.py, and cos598d/comm/gloo.py for the bytes of each collective.",
    measure="python -m cos598d bench --sync gather_scatter,all_reduce --model tiny --world_size 4",
    ranks=(2, 3, 4),
)
