"""Lesson 2: gather and scatter."""

from lesson_cases.changes import of_the_book

HEAD = """import torch

def average(comm, gradient, name):
"""
RIGHT = {
    "adds up in a loop": HEAD
    + """    if comm.rank == 0:
        copies = comm.gather(gradient, name)
        total = torch.zeros_like(gradient)
        for copy in copies:
            total += copy / comm.world_size
        comm.scatter(gradient, [total for _ in copies], name)
    else:
        comm.gather(gradient, name)
        comm.scatter(gradient, None, name)
""",
    "by way of a tensor of its own": HEAD
    + """    flat = gradient.flatten()
    got = comm.gather(flat, "there")
    back = torch.empty_like(flat)
    comm.scatter(back, None if got is None else [sum(got) / len(got)] * len(got), "and back")
    gradient.view(-1)[:] = back
""",
}
WRONG = {
    "only rank 0 gathers": (of_the_book("lesson2.py.txt"), "rank 1 never comes"),
    "not sent back": (
        HEAD
        + """    copies = comm.gather(gradient, name)  #!
    if copies is not None:
        gradient.copy_(torch.stack(copies).mean(dim=0))
""",
        "only rank 0 has the average, rank 1 still has its own gradient",
    ),
    "summed": (
        HEAD
        + """    copies = comm.gather(gradient, name)
    parts = None
    if copies is not None:
        parts = [torch.stack(copies).sum(dim=0)] * comm.world_size
    comm.scatter(gradient, parts, name)  #!
""",
        "is the sum over 2 ranks, not their average",
    ),
    "scatters what it gathered": (
        HEAD
        + """    copies = comm.gather(gradient, name)
    comm.scatter(gradient, copies, name)  #!
""",
        "keeps its own gradient",
    ),
    "only rank 0 scatters": (
        HEAD
        + """    copies = comm.gather(gradient, name)
    if comm.rank == 0:
        mean = torch.stack(copies).mean(dim=0)
        comm.scatter(gradient, [mean] * comm.world_size, name)
""",
        "while rank 1 is in comm.gather of",
    ),
    "all ranks give parts": (
        HEAD
        + """    copies = comm.gather(gradient, name)
    mean = torch.stack(copies or [gradient]).mean(dim=0)
    comm.scatter(gradient, [mean] * comm.world_size, name)  #!
""",
        "rank 1 gave parts to scatter",
    ),
    "list of the others' None": (
        HEAD
        + """    copies = comm.gather(gradient, name)
    mean = torch.stack(copies).mean(dim=0)  #!
    comm.scatter(gradient, [mean] * comm.world_size, name)
""",
        "TypeError",
    ),
    "divided by two": (
        HEAD
        + """    copies = comm.gather(gradient, name)
    parts = None
    if copies is not None:
        mean = (copies[0] + copies[1]) / 2
        parts = [mean] * comm.world_size
    comm.scatter(gradient, parts, name)  #!
""",
        "rank 2's gradient is not in the average",
        (3,),
    ),
    "a new tensor": (
        HEAD
        + """    copies = comm.gather(gradient, name)
    parts = None
    if copies is not None:
        parts = [torch.stack(copies).mean(dim=0)] * comm.world_size
    result = gradient.clone()
    comm.scatter(result, parts, name)  #!
    gradient = result
""",
        "keeps its own gradient",
    ),
    "a broadcast in its place": (
        HEAD
        + """    copies = comm.gather(gradient, name)
    if copies is not None:
        gradient.copy_(torch.stack(copies).mean(dim=0))
    comm.broadcast(gradient, name)  #!
""",
        "by a scatter; other calls go other ways",
        (4,),
    ),
    "an all-reduce in its place": (
        HEAD
        + """    comm.all_reduce(gradient, name)  #!
    gradient /= comm.world_size
""",
        "expected (n-1) S",
        (4,),
    ),
}
