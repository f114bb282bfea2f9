"""Lesson 2 as students write it: changes of the answer that are wrong, with what the check must print, and right ones."""

from lesson_cases import all_right, all_wrong

GATHER = "    copies = comm.gather(gradient, name)\n"
PARTS = """    parts = None
    if copies is not None:
        parts = [torch.stack(copies).mean(dim=0)] * comm.world_size
"""
MEAN = "    mean = torch.stack(copies).mean(dim=0)\n"
SCATTER = "    comm.scatter(gradient, parts, name)\n"
BODY = GATHER + PARTS + SCATTER
MARKED = "    comm.scatter(gradient, parts, name)  #!\n"
COPIED = "    if copies is not None:\n        gradient.copy_(torch.stack(copies).mean(dim=0))\n"
ALL_SCATTER = "    comm.scatter(gradient, [mean] * comm.world_size, name)"

WRONG = all_wrong(2, {
    "only rank 0 gathers": ("lesson2.py.txt", "rank 1 never makes that call"),
    "not sent back": (
        [(BODY, GATHER.replace("\n", "  #!\n") + COPIED)], "only rank 0 has the average, and rank 1 still has its own gradient",
    ),
    "summed": ([("mean(dim=0)", "sum(dim=0)"), (SCATTER, MARKED)], "is the sum over 2 ranks, not their average"),
    "scatters what it gathered": ([(PARTS, ""), (SCATTER, MARKED.replace("parts", "copies"))], "keeps its own gradient"),
    "only rank 0 scatters": (
        [(PARTS + SCATTER, "    if comm.rank == 0:\n    " + MEAN + f"    {ALL_SCATTER}\n")], "while rank 1 is in comm.gather of",
    ),
    "all ranks give parts": (
        [(PARTS + SCATTER, MEAN.replace("copies", "copies or [gradient]") + f"{ALL_SCATTER}  #!\n")], "rank 1 gave parts to scatter",
    ),
    "list of the others' None": ([(PARTS + SCATTER, MEAN.replace("\n", "  #!\n") + f"{ALL_SCATTER}\n")], "TypeError"),
    "divided by two": (
        [("torch.stack(copies).mean(dim=0)", "(copies[0] + copies[1]) / 2"), (SCATTER, MARKED)],
        "rank 2's gradient is not in the average", (3,),
    ),
    "a new tensor": (
        [(SCATTER, "    result = gradient.clone()\n" + MARKED.replace("gradient", "result") + "    gradient = result\n")],
        "keeps its own gradient",
    ),
    "a broadcast in its place": (
        [(PARTS + SCATTER, COPIED + "    comm.broadcast(gradient, name)  #!\n")], "by a scatter; other calls take other paths", (4,),
    ),
    "an all-reduce in its place": (
        [(BODY, "    comm.all_reduce(gradient, name)  #!\n    gradient /= comm.world_size\n")], "expected (n-1) S", (4,),
    ),
})  # fmt: skip

IN_A_LOOP = """    if comm.rank == 0:
        copies = comm.gather(gradient, name)
        total = torch.zeros_like(gradient)
        for copy in copies:
            total += copy / comm.world_size
        comm.scatter(gradient, [total for _ in copies], name)
    else:
        comm.gather(gradient, name)
        comm.scatter(gradient, None, name)
"""
OWN_TENSOR = """    flat = gradient.flatten()
    got = comm.gather(flat, "there")
    back = torch.empty_like(flat)
    comm.scatter(back, None if got is None else [sum(got) / len(got)] * len(got), "and back")
    gradient.view(-1)[:] = back
"""
RIGHT = all_right(2, {"adds up in a loop": [(BODY, IN_A_LOOP)], "by way of a tensor of its own": [(BODY, OWN_TENSOR)]})
