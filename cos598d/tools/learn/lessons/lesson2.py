"""Lesson 2: the average by way of rank 0, as task 2(a) makes it."""

from cos598d.tools.learn.lesson import Lesson

LESSON = Lesson(
    number=2,
    name="gather_scatter",
    title="gather and scatter",
    minutes=30,
    question="Every rank has a gradient of its own. Let rank 0 gather them, average them, and scatter the average, so "
    "that every rank ends with the same one. How many bytes pass through rank 0?",
    contract={"average": "average(comm, gradient, name), which turns gradient into the mean over all ranks, in place"},
    hints=(
        "comm.gather(gradient, name) is called by all ranks. Rank 0 gets a list with one tensor of each rank, in order "
        "of rank; all others get None. That tells a rank which part is its own: `if copies is not None`.",
        "On rank 0 make the mean of the list: add up its tensors and divide by comm.world_size. "
        "torch.stack(copies).mean(dim=0) does both.",
        "comm.scatter(gradient, parts, name) is called by all ranks as well. Rank 0 gives a list of world_size "
        "tensors, here world_size times the mean, the others None; what arrives is put into gradient.",
    ),
    checks="lesson2",
    read="cos598d/sync/gather_scatter.py, the same in the library; reduce_broadcast.py sums on the way to rank 0.",
    measure="python -m cos598d bench --sync gather_scatter,all_reduce,ddp --model tiny",
    ranks=(2, 3, 4),
)
