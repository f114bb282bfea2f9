"""Lesson 3 as students write it: changes of the answer that are wrong, with what the check must print, and right ones."""

from lesson_cases import all_right, all_wrong

CALL = "    comm.all_reduce(gradient, name)\n"
DIVIDE = "    gradient /= comm.world_size\n"
BODY = CALL + DIVIDE
MARKED = "    comm.all_reduce(gradient, name)  #!\n"

WRONG = all_wrong(3, {
    "summed": ([(BODY, MARKED)], "is the sum over 2 ranks, not their average: divide"),
    "divided by two": ([(BODY, MARKED + "    gradient /= 2\n")], "divided by the wrong number", (3,)),
    "divided twice": ([(BODY, DIVIDE + MARKED + DIVIDE)], "divide only once"),
    "not in place": (
        [(BODY, "    total = gradient.clone()\n    comm.all_reduce(total, name)  #!\n    gradient = total / comm.world_size\n")],
        "keeps its own gradient",
    ),
    "out-of-place division": (
        [(BODY, MARKED + "    gradient = gradient / comm.world_size\n")],
        "is the sum over 2 ranks, not their average: line 9 computes a new tensor and calls it gradient",
    ),
    "not waited for": ([(BODY, DIVIDE + MARKED.replace("name)", "name, async_op=True)"))], "is never waited for"),
    "only rank 0 calls": ([(CALL, f"    if comm.rank == 0:\n    {MARKED}")], "rank 1 never makes that call"),
    "only rank 0 divides": ([(BODY, f"{MARKED}    if comm.rank == 0:\n    {DIVIDE}")], "rank 1's gradient is the sum"),
    "the largest": ([(BODY, "    import torch\n    comm.all_reduce(gradient, name, op=torch.distributed.ReduceOp.MAX)  #!\n")], "the largest of the ranks' gradients"),
    "torch.distributed itself": ([(CALL, "    import torch\n    torch.distributed.all_reduce(gradient)  #!\n")], "torch.distributed is called directly"),
    "torch.distributed with a gradient": (
        [("\ndef average", "import torch.distributed.nn.functional as functional\n\n\ndef average"), (BODY, "    gradient.copy_(functional.all_reduce(gradient.clone()) / comm.world_size)  #!\n")],
        "torch.distributed is called directly (all_reduce in line",
    ),
    "called an agreement": ([(BODY, BODY + MARKED.replace("name)", 'name, purpose="agreement")') + DIVIDE)], "made 16 calls for 8 gradients"),
    "twice round": ([(BODY, BODY + MARKED + DIVIDE)], "made 16 calls for 8 gradients"),
})  # fmt: skip

COPY = """    total = gradient.clone()
    comm.all_reduce(total, "a copy of " + name, async_op=True).wait()
    gradient.copy_(total.div_(comm.world_size))
"""
RIGHT = all_right(
    3, {"divides first": [(BODY, DIVIDE + "    comm.all_reduce(gradient)\n")], "a copy, then back": [(BODY, COPY)]}
)
