"""Lesson 4: one call instead of 105."""

from lesson_cases.changes import of_the_book

HEAD = """import torch

def average_all(comm, gradients):
"""
GROUPS = (
    HEAD
    + """    groups = {}
    for name, tensor in gradients:
        groups.setdefault(tensor.dtype, []).append(tensor)
"""
)
RIGHT = {
    "a buffer that is filled": HEAD
    + """    for dtype in sorted({tensor.dtype for _, tensor in gradients}, key=str):
        tensors = [tensor for _, tensor in gradients if tensor.dtype == dtype]
        buffer = torch.empty(sum(t.numel() for t in tensors), dtype=dtype)
        place = 0
        for t in tensors:
            buffer[place : place + t.numel()] = t.reshape(-1) / comm.world_size
            place += t.numel()
        comm.all_reduce(buffer)
        place = 0
        for t in tensors:
            t.view(-1).copy_(buffer[place : place + t.numel()])
            place += t.numel()
""",
    "both under way at once": GROUPS
    + """    buffers = {dtype: torch.cat([t.flatten() for t in reversed(ts)]) for dtype, ts in groups.items()}
    calls = [comm.all_reduce(buffer, str(dtype), async_op=True) for dtype, buffer in buffers.items()]
    for call in calls:
        call.wait()
    for dtype, ts in groups.items():
        for t, part in zip(reversed(ts), (buffers[dtype] / comm.world_size).split([t.numel() for t in reversed(ts)])):
            t[...] = part.view_as(t)
""",
}
WRONG = {
    "the order of a set": (
        HEAD
        + """    for dtype in {tensor.dtype for _, tensor in gradients}:
        tensors = [tensor for _, tensor in gradients if tensor.dtype == dtype]
        buffer = torch.cat([t.flatten() for t in tensors])
        comm.all_reduce(buffer, str(dtype))  #!
        buffer /= comm.world_size
        for t, part in zip(tensors, buffer.split([t.numel() for t in tensors])):
            t.copy_(part.view_as(t))
""",
        "every rank must make the same calls in the same order",
    ),
    "one buffer, and not copied back": (of_the_book("lesson4.py.txt"), "keeps its own gradient"),
    "one buffer for all dtypes": (
        HEAD
        + """    tensors = [tensor for _, tensor in gradients]
    buffer = torch.cat([t.flatten() for t in tensors])
    comm.all_reduce(buffer, "all")  #!
    buffer /= comm.world_size
    for t, part in zip(tensors, buffer.split([t.numel() for t in tensors])):
        t.copy_(part.view_as(t))
""",
        "made 1 call for 8 gradients, expected 2",
    ),
    "everything as float32": (
        HEAD
        + """    tensors = [tensor for _, tensor in gradients]
    buffer = torch.cat([t.flatten().float() for t in tensors])
    comm.all_reduce(buffer, "all")  #!
    buffer /= comm.world_size
    for t, part in zip(tensors, buffer.split([t.numel() for t in tensors])):
        t.copy_(part.view_as(t))
""",
        "made 1 call for 8 gradients, expected 2",
    ),
    "not copied back": (
        GROUPS
        + """    for dtype, tensors in groups.items():
        buffer = torch.cat([t.flatten() for t in tensors])
        comm.all_reduce(buffer, str(dtype))  #!
        buffer /= comm.world_size
""",
        "keeps its own gradient",
    ),
    "copied back to names": (
        GROUPS
        + """    for dtype, tensors in groups.items():
        buffer = torch.cat([t.flatten() for t in tensors])
        comm.all_reduce(buffer, str(dtype))  #!
        buffer /= comm.world_size
        for t, part in zip(tensors, buffer.split([t.numel() for t in tensors])):
            t = part.view_as(t)
""",
        "keeps its own gradient",
    ),
    "not divided": (
        GROUPS
        + """    for dtype, tensors in groups.items():
        buffer = torch.cat([t.flatten() for t in tensors])
        comm.all_reduce(buffer, str(dtype))  #!
        for t, part in zip(tensors, buffer.split([t.numel() for t in tensors])):
            t.copy_(part.view_as(t))
""",
        "is the sum over 2 ranks, not their average",
    ),
    "cut in another order": (
        GROUPS
        + """    for dtype, tensors in groups.items():
        buffer = torch.cat([t.flatten() for t in tensors])
        comm.all_reduce(buffer, str(dtype))  #!
        buffer /= comm.world_size
        for t, part in zip(tensors, buffer.split([t.numel() for t in tensors][::-1])):
            t.view(-1)[: part.numel()] = part[: t.numel()]
""",
        "gradients are wrong",
    ),
    "always from the start": (
        GROUPS
        + """    for dtype, tensors in groups.items():
        buffer = torch.cat([t.flatten() for t in tensors])
        comm.all_reduce(buffer, str(dtype))  #!
        buffer /= comm.world_size
        for t in tensors:
            t.copy_(buffer[: t.numel()].view_as(t))
""",
        "gradients are wrong",
    ),
    "one call for each": (
        HEAD
        + """    for name, tensor in gradients:
        comm.all_reduce(tensor, name)  #!
        tensor /= comm.world_size
""",
        "made 8 calls for 8 gradients, expected 2",
    ),
    "the last is lost": (
        GROUPS
        + """    for dtype, tensors in groups.items():
        buffer = torch.cat([t.flatten() for t in tensors])
        comm.all_reduce(buffer, str(dtype))  #!
        buffer /= comm.world_size
        place = 0
        for t in tensors[:-1]:
            t.copy_(buffer[place : place + t.numel()].view_as(t))
            place += t.numel()
""",
        "wrong on precise, last.bias",
    ),
}
