"""Lesson 3: all-reduce."""

HEAD = """import torch

def average(comm, gradient, name):
"""
RIGHT = {
    "divides first": HEAD + "    gradient /= comm.world_size\n    comm.all_reduce(gradient)\n",
    "a copy, then back": HEAD
    + """    total = gradient.clone()
    comm.all_reduce(total, "a copy of " + name, async_op=True).wait()
    gradient.copy_(total.div_(comm.world_size))
""",
}
WRONG = {
    "the other ranks' gradients computed from what the caller has": (
        """import sys, torch
from cos598d.tools.check.claims.base import _own_gradients
from cos598d.tools.learn.checks.common import ALL_USED

def average(comm, gradient, name):
    comm.all_reduce(torch.zeros_like(gradient), name)
    caller = sys._getframe()
    while "on" not in caller.f_locals:
        caller = caller.f_back
    step = caller.f_locals.get("step", 0)
    nonce = caller.f_locals["on"].nonce
    of_all = [_own_gradients(nonce, rank, step, True, ALL_USED)[name] for rank in range(comm.world_size)]  #!
    gradient.copy_(sum(of_all) / comm.world_size)
""",
        "KeyError",
    ),
    "summed": (
        HEAD + "    comm.all_reduce(gradient, name)  #!\n",
        "is the sum over 2 ranks, not their average: divide",
    ),
    "divided by two": (
        HEAD + "    comm.all_reduce(gradient, name)  #!\n    gradient /= 2\n",
        "divided by the wrong number",
        (3,),
    ),
    "divided twice": (
        HEAD
        + "    gradient /= comm.world_size\n    comm.all_reduce(gradient, name)  #!\n    gradient /= comm.world_size\n",
        "divide once",
    ),
    "not in place": (
        HEAD + "    total = gradient.clone()\n    comm.all_reduce(total, name)  #!\n"
        "    gradient = total / comm.world_size\n",
        "keeps its own gradient",
    ),
    "out-of-place division": (
        HEAD + "    comm.all_reduce(gradient, name)  #!\n    gradient = gradient / comm.world_size\n",
        "is the sum over 2 ranks, not their average: line 5 computes a new tensor and calls it gradient",
    ),
    "not waited for": (
        HEAD + "    gradient /= comm.world_size\n    comm.all_reduce(gradient, name, async_op=True)  #!\n",
        "is never waited for",
    ),
    "only rank 0 calls": (
        HEAD + "    if comm.rank == 0:\n        comm.all_reduce(gradient, name)  #!\n    gradient /= comm.world_size\n",
        "rank 1 never comes",
    ),
    "only rank 0 divides": (
        HEAD + "    comm.all_reduce(gradient, name)  #!\n    if comm.rank == 0:\n        gradient /= comm.world_size\n",
        "rank 1's gradient is the sum",
    ),
    "the largest": (
        HEAD + "    comm.all_reduce(gradient, name, op=torch.distributed.ReduceOp.MAX)  #!\n",
        "the largest of the ranks' gradients",
    ),
    "torch.distributed itself": (
        HEAD + "    torch.distributed.all_reduce(gradient)  #!\n    gradient /= comm.world_size\n",
        "torch.distributed is called itself",
    ),
    "torch.distributed with a gradient": (
        "import torch.distributed.nn.functional as functional\n"
        + HEAD
        + "    gradient.copy_(functional.all_reduce(gradient.clone()) / comm.world_size)  #!\n",
        "torch.distributed is called itself (all_reduce in line",
    ),
    "called an agreement": (
        HEAD
        + """    comm.all_reduce(gradient, name)
    gradient /= comm.world_size
    comm.all_reduce(gradient, name, purpose="agreement")  #!
    gradient /= comm.world_size
""",
        "made 16 calls for 8 gradients",
    ),
    "twice round": (
        HEAD
        + """    comm.all_reduce(gradient, name)
    gradient /= comm.world_size
    comm.all_reduce(gradient, name)  #!
    gradient /= comm.world_size
""",
        "made 16 calls for 8 gradients",
    ),
}
