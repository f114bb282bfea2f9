"""Lesson 4 as students write it: changes of the answer that are wrong, with what the check must print, and right ones."""

from lesson_cases import all_right, all_wrong

GROUPS = """    by_dtype = {}
    for _, tensor in gradients:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
"""
EACH = "    for dtype, tensors in by_dtype.items():\n"
BUFFER = "        buffer = torch.cat([tensor.flatten() for tensor in tensors])\n"
CALL = '        comm.all_reduce(buffer, f"all of {dtype}")\n'
DIVIDE = "        buffer /= comm.world_size\n"
BACK = """        for tensor, part in zip(tensors, buffer.split([tensor.numel() for tensor in tensors])):
            tensor.copy_(part.view_as(tensor))
"""
MARK = (CALL, CALL.replace("\n", "  #!\n"))
ONE_GROUP = '    for dtype, tensors in [("all", [tensor for _, tensor in gradients])]:\n'
BY_SET = """    for dtype in {tensor.dtype for _, tensor in gradients}:
        tensors = [tensor for _, tensor in gradients if tensor.dtype == dtype]
"""
WITHOUT_LAST = """        place = 0
        for t in tensors[:-1]:
            t.copy_(buffer[place : place + t.numel()].view_as(t))
            place += t.numel()
"""

WRONG = all_wrong(4, {
    "one buffer, and not copied back": ("lesson4.py.txt", "keeps its own gradient"),
    "the order of a set": ([(GROUPS + EACH, BY_SET), MARK], "every rank must make the same calls in the same order"),
    "one buffer for all dtypes": ([(GROUPS + EACH, ONE_GROUP), MARK], "made 1 call for 8 gradients, expected 2"),
    "not copied back": ([(BACK, ""), MARK], "keeps its own gradient"),
    "not divided": ([(DIVIDE, ""), MARK], "is the sum over 2 ranks, not their average"),
    "cut in another order": (
        [("for tensor in tensors])):", "for tensor in tensors][::-1])):"), ("tensor.copy_(part.view_as(tensor))", "tensor.view(-1)[: part.numel()] = part[: tensor.numel()]"), MARK],
        "gradients are wrong",
    ),
    "one call for each": (
        [(GROUPS + EACH + BUFFER + CALL + DIVIDE + BACK, "    for name, tensor in gradients:\n        comm.all_reduce(tensor, name)  #!\n        tensor /= comm.world_size\n")],
        "made 8 calls for 8 gradients, expected 2",
    ),
    "the last is lost": ([(BACK, WITHOUT_LAST), MARK], "wrong on precise, last.bias"),
})  # fmt: skip

FILLED = """    for dtype in sorted({tensor.dtype for _, tensor in gradients}, key=str):
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
"""
AT_ONCE = """    buffers = {dtype: torch.cat([t.flatten() for t in reversed(ts)]) for dtype, ts in by_dtype.items()}
    calls = [comm.all_reduce(buffer, str(dtype), async_op=True) for dtype, buffer in buffers.items()]
    for call in calls:
        call.wait()
    for dtype, ts in by_dtype.items():
        for t, part in zip(reversed(ts), (buffers[dtype] / comm.world_size).split([t.numel() for t in reversed(ts)])):
            t[...] = part.view_as(t)
"""
RIGHT = all_right(4, {
    "a buffer that is filled": [(GROUPS + EACH + BUFFER + CALL + DIVIDE + BACK, FILLED)],
    "both under way at once": [(EACH + BUFFER + CALL + DIVIDE + BACK, AT_ONCE)],
})  # fmt: skip
