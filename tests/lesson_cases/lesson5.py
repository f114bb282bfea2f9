"""Lesson 5: the ring itself."""

from lesson_cases.changes import of_the_book

HEAD = """import torch

def all_reduce(comm, tensor):
    n, rank = comm.world_size, comm.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    parts = tensor.tensor_split(n)
"""
COLLECT = """    for s in range(n - 1):
        mine = parts[(rank - s - 1) % n]
        landing = torch.empty_like(mine)
        sending = comm.isend(parts[(rank - s) % n], right)
        comm.recv(landing, left)
        sending.wait()
        mine += landing
"""
HAND_ROUND = """    for s in range(n - 1):
        sending = comm.isend(parts[(rank + 1 - s) % n], right)
        comm.recv(parts[(rank - s) % n], left)
        sending.wait()
"""
RIGHT = {
    "the other way round, receiving first": """import torch

def all_reduce(comm, tensor):
    n, me = comm.world_size, comm.rank
    parts = list(tensor.chunk(n)) + [tensor[:0]] * n
    for s in range(2 * (n - 1)):
        out, into = parts[(me + s) % n], parts[(me + s + 1) % n]
        adds = s < n - 1
        if not adds:
            out, into = parts[(me + s) % n], parts[(me + s + 1) % n]
        landing = torch.zeros_like(into)
        receiving = comm.irecv(landing, (me + 1) % n)
        comm.isend(out, (me - 1) % n).wait()
        receiving.wait()
        into.copy_(into + landing if adds else landing)
""",
    "even ranks send first": """import torch

def all_reduce(comm, tensor):
    n, me = comm.world_size, comm.rank
    size = -(-len(tensor) // n)
    parts = [tensor[k * size : (k + 1) * size] for k in range(n)]
    buffer = torch.empty(size, dtype=tensor.dtype)
    for s in range(2 * n - 2):
        shift = 0 if s < n - 1 else 1
        out, into = parts[(me - s % (n - 1) + shift) % n], parts[(me - s % (n - 1) - 1 + shift) % n]
        space = buffer[: len(into)]
        if me == 0:
            comm.send(out, (me + 1) % n)
            comm.recv(space, (me - 1) % n)
        else:
            comm.recv(space, (me - 1) % n)
            comm.send(out, (me + 1) % n)
        if shift:
            into[:] = space
        else:
            into.add_(space)
""",
}
BY_LIBRARY = """import torch

def all_reduce(comm, tensor):
    n, rank = comm.world_size, comm.rank
    comm.all_reduce(tensor)  #!
    for part in tensor.clone().tensor_split(n) * 2:
        if part.numel():
            sending = comm.isend(part, (rank + 1) % n)
            comm.recv(torch.empty_like(part), (rank - 1) % n)
            sending.wait()
"""
WRONG = {
    "by the library, with messages for nothing": (
        BY_LIBRARY,
        "is called: the sum has to be made of messages",
    ),
    "by the library's own class, with messages for nothing": (
        """import torch
from cos598d.comm.communicator import Communicator

def all_reduce(comm, tensor):
    n, rank = comm.world_size, comm.rank
    Communicator.all_reduce(comm, tensor, "tensor")
    for part in [part for part in tensor.clone().tensor_split(n)[1:] if part.numel()] * 2:
        sending = comm.isend(part, (rank + 1) % n)
        comm.recv(torch.empty_like(part), (rank - 1) % n)
        sending.wait()
""",
        "has the sum, and its messages did not bring it",
    ),
    "another part goes out in the second half": (
        HEAD
        + COLLECT
        + HAND_ROUND.replace("parts[(rank + 1 - s) % n]", "parts[(rank - s) % n]").replace(
            "parts[(rank - s) % n], left", "parts[(rank - s - 1) % n], left"
        ),
        "the first half was right",
    ),
    "stops before the end of the second half": (
        HEAD + COLLECT + HAND_ROUND.replace("range(n - 1)", "range(n - 2)"),
        "the first half was right",
    ),
    "another part goes out than comes in": (
        HEAD + COLLECT.replace("isend(parts[(rank - s) % n]", "isend(parts[(rank - s + 1) % n]") + HAND_ROUND,
        "both ends of a message must have one length",
    ),
    "all send first": (
        HEAD
        + """    for s in range(n - 1):
        mine = parts[(rank - s - 1) % n]
        landing = torch.empty_like(mine)
        comm.send(parts[(rank - s) % n], right)  #!
        comm.recv(landing, left)
        mine += landing
"""
        + HAND_ROUND,
        "all send and nobody receives",
    ),
    "only collects": (HEAD + COLLECT, "each rank has the sum of one part alone"),
    "replaces in the first half": (
        HEAD + COLLECT.replace("mine += landing", "mine.copy_(landing)") + HAND_ROUND,
        "own: in the first half what comes in is added",
    ),
    "adds in the second half": (
        HEAD
        + COLLECT
        + """    for s in range(n - 1):
        mine = parts[(rank - s) % n]
        landing = torch.empty_like(mine)
        sending = comm.isend(parts[(rank + 1 - s) % n], right)
        comm.recv(landing, left)
        sending.wait()
        mine += landing
""",
        "in the second half what comes in replaces what stands there",
    ),
    "the remainder is lost": (
        HEAD.replace(
            "parts = tensor.tensor_split(n)",
            "size = len(tensor) // n; parts = [tensor[k * size : (k + 1) * size] for k in range(n)]",
        )
        + COLLECT
        + HAND_ROUND,
        "remainder",
    ),
    "lands in float32": (
        HEAD + COLLECT.replace("torch.empty_like(mine)", "torch.empty(len(mine))") + HAND_ROUND,
        "must land in a tensor of the same dtype",
    ),
    "an average": (
        HEAD + COLLECT + HAND_ROUND + "    tensor /= n\n",
        "is the average over 3 ranks: an all-reduce is the sum",
    ),
    "the whole tensor each time": (
        """import torch

def all_reduce(comm, tensor):
    n, rank = comm.world_size, comm.rank
    total, going = tensor.clone(), tensor.clone()
    for s in range(n - 1):
        landing = torch.empty_like(tensor)
        sending = comm.isend(going, (rank + 1) % n)
        comm.recv(landing, (rank - 1) % n)
        sending.wait()
        total += landing
        going = landing
    tensor.copy_(total)
""",
        "the whole tensor travels each time",
    ),
    "straight to their owners": (
        """import torch

def all_reduce(comm, tensor):
    n, rank = comm.world_size, comm.rank
    parts = tensor.tensor_split(n)
    for s in range(1, n):
        to, source = (rank + s) % n, (rank - s) % n
        landing = torch.empty_like(parts[rank])
        sending = comm.isend(parts[to].clone(), to)
        comm.recv(landing, source)
        sending.wait()
        parts[rank].add_(landing)
    for s in range(1, n):
        to, source = (rank + s) % n, (rank - s) % n
        sending = comm.isend(parts[rank], to)
        comm.recv(parts[source], source)
        sending.wait()
""",
        "expected one neighbour",
    ),
    "one step too many": (
        HEAD + COLLECT + HAND_ROUND.replace("range(n - 1)", "range(n)"),
        "each half has n-1 steps",
    ),
    "no modulo": (
        HEAD.replace("(rank + 1) % n, (rank - 1) % n", "rank + 1, rank - 1") + COLLECT + HAND_ROUND,
        "ValueError: rank",
    ),
    "not waited for": (
        HEAD + COLLECT.replace("        sending.wait()\n", "") + HAND_ROUND,
        "what nobody waits for may never arrive",
    ),
    "by the library": (
        """def all_reduce(comm, tensor):
    comm.all_reduce(tensor)
""",
        "the sum has to be made of messages",
    ),
    "the whole tensor, all send first": (of_the_book("lesson5-deadlock.py.txt"), "all send and nobody receives"),
    "through rank 0": (
        """import torch

def all_reduce(comm, tensor):
    if comm.rank == 0:
        for other in range(1, comm.world_size):
            landing = torch.empty_like(tensor)
            comm.recv(landing, other)
            tensor += landing
        for other in range(1, comm.world_size):
            comm.send(tensor, other)
    else:
        comm.send(tensor, 0)
        comm.recv(tensor, 0)
""",
        "the whole tensor travels each time",
    ),
}
