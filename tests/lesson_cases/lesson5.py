"""Lesson 5 as students write it: changes of the answer that are wrong, files that go another way, and right files."""

from lesson_cases import all_right, all_wrong, part_of

BODY = part_of(5, '    """Turn')

SEND = """        sending = comm.isend(parts[outgoing % n], right, f"part {outgoing % n}")
        comm.recv(incoming, left)
        sending.wait()
"""
HALF = "    for step in range(n - 1):\n"
COLLECT = (
    HALF
    + """        mine = parts[(comm.rank - step - 1) % n]
        landing = torch.empty_like(mine)
        pass_on(comm.rank - step, landing)
        mine += landing
"""
)
HAND_ROUND = HALF + "        pass_on(comm.rank + 1 - step, parts[(comm.rank - step) % n])\n"
PARTS = "    parts = tensor.tensor_split(n)\n"
NO_REMAINDER = "    size = len(tensor) // n; parts = [tensor[k * size : (k + 1) * size] for k in range(n)]\n"
ADDS = """        mine = parts[(comm.rank - step) % n]
        landing = torch.empty_like(mine)
        pass_on(comm.rank + 1 - step, landing)
        mine += landing
"""
WHOLE = """    n, rank = comm.world_size, comm.rank
    total, going = tensor.clone(), tensor.clone()
    for s in range(n - 1):
        landing = torch.empty_like(tensor)
        sending = comm.isend(going, (rank + 1) % n)
        comm.recv(landing, (rank - 1) % n)
        sending.wait()
        total += landing
        going = landing
    tensor.copy_(total)
"""
STRAIGHT = """    n, rank = comm.world_size, comm.rank
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
"""
WRONG = all_wrong(5, {
    "the whole tensor, all send first": ("lesson5-deadlock.py.txt", "all send and none receives"),
    "the whole tensor each time": ([(BODY, WHOLE)], "the whole tensor is sent each time"),
    "straight to their owners": ([(BODY, STRAIGHT)], "expected only one neighbour"),
    "by the library": ([(BODY, "    comm.all_reduce(tensor)\n")], "the sum has to be made of messages"),
    "another part goes out in the second half": ([(HAND_ROUND, HAND_ROUND.replace("rank - step", "rank - step - 1").replace("rank + 1 - step", "rank - step"))], "the first half was right"),
    "stops before the end of the second half": ([(HAND_ROUND, HAND_ROUND.replace("range(n - 1)", "range(n - 2)"))], "the first half was right"),
    "another part goes out than comes in": ([("pass_on(comm.rank - step, landing)", "pass_on(comm.rank - step + 1, landing)")], "both ends of a message must have the same length"),
    "all send first": ([(SEND, "        comm.send(parts[outgoing % n], right)  #!\n        comm.recv(incoming, left)\n")], "all send and none receives"),
    "only collects": ([(HAND_ROUND, "")], "each rank has the sum of only one part"),
    "replaces in the first half": ([("mine += landing", "mine.copy_(landing)")], "own: in the first half what comes in is added"),
    "adds in the second half": ([(HAND_ROUND, HALF + ADDS)], "in the second half what comes in replaces what is there"),
    "the remainder is lost": ([(PARTS, NO_REMAINDER)], "remainder"),
    "lands in float32": ([("torch.empty_like(mine)", "torch.empty(len(mine))")], "receive into a tensor of the same dtype"),
    "an average": ([(HAND_ROUND, HAND_ROUND + "    tensor /= n\n")], "is the average over 3 ranks: an all-reduce is the sum"),
    "one step too many": ([(HAND_ROUND, HAND_ROUND.replace("range(n - 1)", "range(n)"))], "each half has n-1 steps"),
    "no modulo": ([("(comm.rank + 1) % n, (comm.rank - 1) % n", "comm.rank + 1, comm.rank - 1")], "ValueError: rank"),
    "not waited for": ([(COLLECT, COLLECT.replace("pass_on(comm.rank - step, landing)", "comm.isend(parts[(comm.rank - step) % n], right)\n        comm.recv(landing, left)"))], "it may never arrive"),
})  # fmt: skip

OTHER_WAY_ROUND = """    n, me = comm.world_size, comm.rank
    parts = list(tensor.chunk(n)) + [tensor[:0]] * n
    for s in range(2 * (n - 1)):
        out, into = parts[(me + s) % n], parts[(me + s + 1) % n]
        adds = s < n - 1
        landing = torch.zeros_like(into)
        receiving = comm.irecv(landing, (me + 1) % n)
        comm.isend(out, (me - 1) % n).wait()
        receiving.wait()
        into.copy_(into + landing if adds else landing)
"""
RANK_0_SENDS_FIRST = """    n, me = comm.world_size, comm.rank
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
"""
RIGHT = all_right(5, {
    "the other way round, receiving first": [(BODY, OTHER_WAY_ROUND)],
    "even ranks send first": [(BODY, RANK_0_SENDS_FIRST)],
})  # fmt: skip
