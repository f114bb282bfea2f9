"""Lesson 17 as students write it: changes of the answer that are wrong, with what the check must print, and right ones."""

import re

from lesson_cases import all_right, all_wrong, part_of

COPY_BACK = """        gradient = gradient.clone()
        ctx.comm.all_reduce(gradient, "gradient of the inputs")
        return gradient, None
"""
SUM = """        outputs = outputs.clone()
        comm.all_reduce(outputs, "outputs")
        return outputs
"""
SUM_BACK = "    def backward(ctx, gradient):\n        return gradient, None\n\n\nclass ParallelMLP"
CALL = "        return SumOverRanks.apply(hidden @ self.down, self.comm) + self.down_bias\n"
UP = "nn.Parameter(up[:, mine].clone())"
LOSSES = "    losses = [loss_of(made[k], targets[k]) for k in range(count)] if is_last else None\n"
SEND = '        if not is_last:\n            comm.send(made[k].detach(), comm.rank + 1, f"outputs {k}")\n'
BACK = part_of(17, "        if is_last:\n            (losses", "    return losses")
OPERATORS = """        hidden = functional.gelu(CopyToRanks.apply(inputs, self.comm) @ self.up + self.up_bias)
"""
STRAIGHT = """        inputs = inputs.view_as(inputs)
        inputs.register_hook(self.summed)
        hidden = functional.gelu(inputs @ self.up + self.up_bias)
        outputs = hidden @ self.down
        self.comm.all_reduce(outputs.data, "outputs")
        return outputs + self.down_bias

    def summed(self, gradient):
        gradient = gradient.clone()
        self.comm.all_reduce(gradient, "gradient of the inputs")
        return gradient
"""

WRONG = all_wrong(17, {
    "outputs are not added up": ([(SUM, "        return outputs.clone()\n")], "outputs are this rank's summand: all-reduce the outputs in forward"),
    "gradient is not added up": ([(COPY_BACK, "        return gradient, None\n")], "the gradient of inputs is only that of this rank's columns: all-reduce it in backward"),
    "both operators add in backward": ([(SUM_BACK, SUM_BACK.replace("    return gradient, None", "    gradient = gradient.clone()\n        ctx.comm.all_reduce(gradient)\n        return gradient, None")), (SUM, "        ctx.comm = comm\n" + SUM)], "times too large: backward of SumOverRanks adds nothing"),
    "no bias": ([(CALL, "        return SumOverRanks.apply(hidden @ self.down, self.comm)\n")], "the sum without down_bias"),
    "averaged": ([(SUM, SUM.replace("return outputs", "return outputs / comm.world_size"))], "the average of the summands: they are added"),
    "rows of up": ([(UP, "nn.Parameter(up.chunk(comm.world_size)[comm.rank].clone())")], "ParallelMLP.up is (3, 48) on rank 0 of 2, expected (6, 24): keep the columns"),
    "every other column": ([(UP, "nn.Parameter(up[:, comm.rank :: comm.world_size].clone())")], "ParallelMLP.up on rank 0 of 2 has the right shape and other values: that is one of every 2"),
    "no up_bias": ([(" @ self.up + self.up_bias)", " @ self.up)")], "those without up_bias: add it before gelu"),
    "slices": ([(UP, "nn.Parameter(up[:, mine])")], "clone your part, since a slice keeps the whole tensor"),
    "all columns": ([("mine = slice(comm.rank * width, (comm.rank + 1) * width)", "mine = slice(0, up.shape[1])")], "ParallelMLP.up is (6, 48) on rank 0 of 2"),
    "hidden is gathered too": ([(OPERATORS, OPERATORS + "        self.comm.all_reduce(hidden.detach().clone(), 'hidden')\n")], "forward of ParallelMLP on rank 0 of 2 makes 2 calls, expected 1"),
    "sum of the losses": ([("(losses[k] / count).backward()", "losses[k].backward()")], "times too large: it is that of the sum of the losses"),
    "no gradient is asked for": ([("            came[k].requires_grad_()\n", "")], "line "),
    "another order": ([('            comm.recv(gradient, comm.rank + 1, f"gradient {k}")\n            made[k].backward(gradient)\n', '            comm.recv(gradient, comm.rank + 1, f"gradient {k}")\n            made[count - 1 - k].backward(gradient)\n'), ("comm.send(came[k].grad", "comm.send(came[count - 1 - k].grad if not is_last else came[k].grad")], "do both neighbours take the micro-batches in the same order"),
    "only the last one": ([("            (losses[k] / count).backward()\n", "            stage.zero_grad()\n            (losses[k] / count).backward()\n")], "only, divided by m: add up those of all"),
    "sent at the end": ([(SEND, ""), (LOSSES, '    for k in range(count if not is_last else 0):\n        comm.send(made[k].detach(), comm.rank + 1, f"outputs {k}")\n' + LOSSES)], "send each micro-batch on as soon as it is computed"),
    "losses are divided": ([(LOSSES, LOSSES.replace("loss_of(made[k], targets[k])", "loss_of(made[k], targets[k]) / count")), ("(losses[k] / count)", "losses[k]")], "it is divided by m, which is only for backward"),
    "no losses": ([("    return losses\n", "")], "returns 0 losses, expected"),
    "the bias n times": ("lesson17-bias.py.txt", "the sum with 2 times down_bias: add it after the all-reduce"),
    "one after the other": ("lesson17.py.txt", "only one stage computes at a time"),
})  # fmt: skip

# Backward of a micro-batch follows its forward as soon as the stages after this one are full. Both ends of a pair send
# at the same time then, so no send may wait for its receiver.
SCHEDULE = part_of(17, "    for k in range(count):\n")
INTERLEAVED = (
    "    losses, under_way = [] if is_last else None, []\n\n    def forward(k):\n"
    + SCHEDULE.partition("    for k in range(count):\n")[2].partition(LOSSES)[0]
    + "        if is_last:\n            losses.append(loss_of(made[k], targets[k]))\n\n    def backward(k):\n"
    + BACK
    + """
    warm = min(count, comm.world_size - 1 - comm.rank)
    for k in range(count + warm):
        if k < count:
            forward(k)
        if k >= warm:
            backward(k - warm)
    for message in under_way:
        message.wait()
    return losses
"""
)
INTERLEAVED = re.sub(r"comm\.send\((.*)\)\n", r"under_way.append(comm.isend(\1))\n", INTERLEAVED)
RIGHT = all_right(17, {
    "hooks instead of operators": [(OPERATORS + CALL, STRAIGHT)],
    "one forward, one backward": [(SCHEDULE, INTERLEAVED)],
    "messages under way": [
        (SEND, '        if not is_last:\n            under_way.append(comm.isend(made[k].detach(), comm.rank + 1))\n'),
        ("    came, made = [], []\n", "    came, made, under_way = [], [], []\n"),
        ("    return losses\n", "    for message in under_way:\n        message.wait()\n    return losses\n"),
    ],
})  # fmt: skip
