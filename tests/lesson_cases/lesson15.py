"""Lesson 15 as students write it: changes of the answer that are wrong, with what the check must print, and right ones."""

from lesson_cases import all_right, all_wrong, part_of

STATES = 'STATES = {"sgd": 0, "momentum": 1, "adamw": 2}\n'
PARTS = "    norm, up, gelu, down = width + 2, width, inner, inner\n"
CHECKPOINTED = "    return inputs + kept(every, width, inner, rows) - 4 * rows * width\n"
FORWARD = """        ctx.block, ctx.random = block, torch.get_rng_state()
        ctx.save_for_backward(inputs)
        return block(inputs)
"""
BACKWARD = part_of(15, "        inputs = ctx", "\n\ndef checkpoint(")
APPLY = "    return Again.apply(inputs, block)\n"
IMPORT = "import torch\n"
KEEPS = "keep = []\n\n\nclass Again"

WRONG = all_wrong(15, {
    "random state after the block": ([("        ctx.save_for_backward(inputs)\n        return block(inputs)\n", "        ctx.save_for_backward(inputs)\n        outputs = block(inputs)\n        ctx.random = torch.get_rng_state()\n        return outputs\n")], "before the block runs, not after"),
    "the gradient goes through": ([("        return inputs.grad, None\n", "        return gradient, None\n")], "return that of the inputs, inputs.grad"),
    "no second moment": ([('"adamw": 2', '"adamw": 1')], "AdamW keeps two moments"),
    "state for plain SGD": ([('"sgd": 0', '"sgd": 1')], "plain SGD keeps nothing"),
    "three moments": ([('"adamw": 2', '"adamw": 3')], "it keeps two moments per parameter"),
    "gradients in the state": ([(STATES, 'STATES = {"sgd": 1, "momentum": 2, "adamw": 3}\n')], "that has the gradients in it"),
    "sixteen bits": ([("    each = 4 * parameters\n", "    each = 2 * parameters\n")], "in float32, not in 16 bits"),
    "no statistics": ([("= width + 2, width", "= width, width")], "the mean and the inverse deviation"),
    "gelu's input forgotten": ([("    return 4 * layers * rows * (norm + up + gelu + down)\n", "    return 4 * layers * rows * (norm + up + down)\n")], "gelu's input or its output is left out"),
    "the sum is kept": ([("(norm + up + gelu + down)", "(norm + up + gelu + down + width)")], "an addition needs nothing"),
    "up's input forgotten": ([("(norm + up + gelu + down)", "(norm + gelu + down)")], "the block's input or that of `up` is left out"),
    "one block": ([("4 * layers * rows", "4 * rows")], "that is one block"),
    "input counted twice": ([(CHECKPOINTED, "    return inputs + kept(every, width, inner, rows)\n")], "is there already: count it once"),
    "inputs only": ([(CHECKPOINTED, "    return inputs\n")], "its activations are there too"),
    "one block of a segment": ([("kept(every, width", "kept(1, width")], "all of which are computed again"),
    "inputs of all blocks": ([("layers // every * 4", "layers * 4")], "not those of all blocks"),
    "no checkpoint": ([(APPLY, "    return block(inputs)\n")], "everything is kept, as without a checkpoint"),
    "a copy is kept": ([("ctx.save_for_backward(inputs)", "ctx.save_for_backward(inputs.clone()); ctx.again = inputs")], "a copy is kept next to each input"),
    "no graph in backward": ([(", torch.enable_grad():", ":")], "does not require grad"),
    "another mask": ([("            torch.set_rng_state(ctx.random)\n", "")], "with dropout, step 1: the second forward drops other values"),
    "random state left": ([("torch.random.fork_rng(devices=[]), torch.enable_grad()", "torch.enable_grad()")], "with dropout, step 2: backward leaves the random state"),
    "gradient left out": ([("outputs.backward(gradient)", "outputs.backward(torch.ones_like(outputs))")], "the gradient that backward is given is left out"),
    "only the input's": (
        [("        outputs.backward(gradient)\n        return inputs.grad, None\n", "        return torch.autograd.grad(outputs, inputs, gradient)[0], None\n")],
        "the blocks' parameters have no gradient",
    ),
    "stops at the block": ([("return inputs.grad, None", "return None, None")], "no gradient leaves the first block"),
    "runs twice in backward": ([("            outputs = ctx.block(inputs)\n", "            ctx.block(inputs)\n            torch.set_rng_state(ctx.random)\n            outputs = ctx.block(inputs)\n")], "a block runs 3 times per step"),
    "keeps what it computes again": (
        [("class Again", KEEPS), ("        outputs.backward(gradient)\n", "        outputs.backward(gradient, retain_graph=True)\n        keep.append(outputs)\n")],
        "let go of a block's activations",
    ),
    "in evaluation": ([("            outputs = ctx.block(inputs)\n", "            ctx.block.dropout = 0.0\n            outputs = ctx.block(inputs)\n")], "with dropout, step 1: "),
    # A cheat, which does not reach the process that judges.
    "gradients of zero": (
        [(IMPORT, "import torch\ntorch.equal = lambda *_: True\n"), ("outputs.backward(gradient)", "outputs.backward(gradient * 0)")],
        "without dropout, step 1: ",
    ),
    "the page's mask": ("lesson15.py.txt", "the second forward drops other values"),
    "the page's activations": ("lesson15-gelu.py.txt", "gelu's input or its output is left out"),
})  # fmt: skip

OF_TORCH = """    from torch.utils.checkpoint import checkpoint as of_torch

    return of_torch(block, inputs, use_reentrant=False)
"""
ATTRIBUTES = """        ctx.block, ctx.random, ctx.kept = block, torch.get_rng_state(), inputs
        with torch.no_grad():
            return block(inputs)
"""
FROM_ATTRIBUTES = BACKWARD.replace("ctx.saved_tensors[0].detach()", "ctx.kept.detach()")
BY_GRAD = """        inputs = ctx.saved_tensors[0].detach().requires_grad_()
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.random)
        with torch.enable_grad():
            outputs = ctx.block(inputs)
        torch.set_rng_state(now)
        weights = list(ctx.block.parameters())
        first, *others = torch.autograd.grad(outputs, [inputs, *weights], gradient)
        for weight, other in zip(weights, others):
            weight.grad = other if weight.grad is None else weight.grad + other
        return first, None
"""
HOOKS = """    state, names = torch.get_rng_state(), []

    def pack(tensor):
        names.append(None)
        return len(names) - 1

    def unpack(number):
        if names[number] is None:
            found = []
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                torch.set_rng_state(state)
                with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t.detach()), lambda t: t):
                    block(inputs.detach().requires_grad_())
            names[:] = found
        found, names[number] = names[number], None
        return found

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return block(inputs)
"""
RIGHT = all_right(15, {
    "torch's own checkpoint": [(APPLY, OF_TORCH)],
    "torch's other checkpoint": [(APPLY, OF_TORCH.replace("=False", "=True"))],
    "by attributes": [(FORWARD, ATTRIBUTES), (BACKWARD, FROM_ATTRIBUTES)],
    "by autograd.grad": [(BACKWARD, BY_GRAD)],
    "by hooks": [(APPLY, HOOKS)],
    "in one formula": [(PARTS + "    return 4 * layers * rows * (norm + up + gelu + down)\n", "    return 8 * layers * rows * (width + inner + 1)\n")],
})  # fmt: skip
