"""Lesson 11 as students write it: changes of the answer that are wrong, with what the check must print, and right ones."""

from lesson_cases import all_right, all_wrong, part_of

GATHER = """        parts, _ = self.comm.all_gather(self.part, "weights")
        weights = torch.cat(parts)[: gradient.numel()]
"""
SPLIT = """        for p, new in zip(self.parameters, weights.split([p.numel() for p in self.parameters])):
            p.data.copy_(new.view_as(p))
            p.grad = None
"""
CUT = part_of(11, "    elements", "\n\nclass Zero1")
FLOORED = """    elements = flat.numel() // comm.world_size
    return flat[comm.rank * elements : (comm.rank + 1) * elements].clone()
"""
SHORT = "        weights = torch.cat([*parts, torch.cat([p.data.flatten() for p in self.parameters])[sum(map(len, parts)) :]])\n"
BACKWARD = """        gradient = gradient.clone()
        ctx.comm.all_reduce(gradient, "gradient")
        part = cut(gradient, ctx.comm) / ctx.comm.world_size
"""
CHECKPOINT = "return checkpoint(gather_and_run, self.parts[number], inputs, use_reentrant=False)"
OPTIMIZER = "        self.optimizer = make_optimizer([self.part])\n"

WRONG = all_wrong(11, {
    "whole_state": (
        [("self.part = cut(torch.cat([p.data.flatten() for p in self.parameters]), comm)", "self.part = torch.cat([p.data.flatten() for p in self.parameters])"),
         ("self.part.grad = cut(gradient, self.comm)", "self.part.grad = gradient"),
         ("self.comm.all_gather(self.part, ", "self.comm.all_gather(cut(self.part, self.comm), ")],
        "give make_optimizer only this rank's part",
    ),
    "summed": ([("        gradient /= self.comm.world_size\n", "")], "by the sum of 3 ranks' gradients"),
    "own_gradient": ([('        self.comm.all_reduce(gradient, "gradients")\n        gradient /= self.comm.world_size\n', "")], "moved by"),
    "parts_not_gathered": (
        [(GATHER, '        parts, _ = self.comm.all_gather(self.part, "weights")\n        start = self.comm.rank * len(self.part)\n        weights = torch.cat([p.data.flatten() for p in self.parameters])\n        weights[start : start + len(self.part)] = self.part[: len(weights) - start]\n')],
        "each rank needs the parts that the others have stepped",
    ),
    "not_copied_back": ([(SPLIT, "        for p in self.parameters:\n            p.grad = None\n")], "no weight has moved"),
    "gradients_stay": ([("            p.data.copy_(new.view_as(p))\n            p.grad = None\n", "            p.data.copy_(new.view_as(p))\n")], "still has a .grad"),
    "remainder_lost": ([(CUT, FLOORED), (GATHER, GATHER.splitlines(True)[0] + SHORT)], "is not divisible by the number of ranks"),
    "optimizer_each_step": (
        [(OPTIMIZER, "        self.make_optimizer = make_optimizer\n"), ("        self.optimizer.step()\n        self.part.grad = None\n", "        self.make_optimizer([self.part]).step()\n        self.part.grad = None\n")],
        "is there one optimizer for all steps?",
    ),
    "whole_weights_kept": ([("        self.elements = [", "        self.layers = layers\n        self.elements = [")], "after the constructor has returned"),
    "no_checkpoint": ([(CHECKPOINT, "return gather_and_run(self.parts[number], inputs)")], "backward has to gather them once more"),
    "copies_in_lists": ([("        self.elements = [", "        self.layers = [weights.tolist() for weights in layers]\n        self.elements = [")], "bytes after a step, expected at most"),
    "part_is_a_view": ([(CUT, CUT.replace(".clone()", "").replace("    padded = ", "    if flat.numel() % comm.world_size == 0:\n        return flat.view(comm.world_size, elements)[comm.rank]\n    padded = "))], "a slice keeps the tensor that it is a slice of"),
    "parts_gradient_not_averaged": ([(BACKWARD, "        part = cut(gradient, ctx.comm)\n")], "moved by"),
    "parts_gradient_summed": ([("cut(gradient, ctx.comm) / ctx.comm.world_size", "cut(gradient, ctx.comm)")], "by the sum of 3 ranks' gradients"),
})  # fmt: skip

# Whole parameters dealt out, the largest first, each to the rank that has least; a reduce and a broadcast for each.
ZERO1 = part_of(11, "    def __init__(self, comm, model", "\n\nclass Gathered")
DEALT = """    def __init__(self, comm, model, make_optimizer):
        self.comm = comm
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        held, self.owner = [0] * comm.world_size, {}
        for p in sorted(self.parameters, key=lambda p: -p.numel()):
            self.owner[p] = held.index(min(held))
            held[self.owner[p]] += p.numel()
        self.optimizer = make_optimizer([p for p in self.parameters if self.owner[p] == comm.rank])

    def step(self):
        for p in self.parameters:
            self.comm.reduce(p.grad, "gradient", root=self.owner[p])
            p.grad /= self.comm.world_size
            if self.owner[p] != self.comm.rank:
                p.grad = None
        self.optimizer.step()
        for p in self.parameters:
            self.comm.broadcast(p.data, "weight", root=self.owner[p])
            p.grad = None
"""
# A layer by itself: forward keeps its inputs, backward computes it once more.
RECOMPUTED = """
        class Layer(torch.autograd.Function):
            @staticmethod
            def forward(ctx, part, inputs):
                ctx.save_for_backward(inputs)
                return run(self.whole(part, number), inputs)

            @staticmethod
            def backward(ctx, gradient):
                (inputs,) = ctx.saved_tensors
                inputs = inputs.detach().requires_grad_()
                weights = self.whole(self.parts[number].detach(), number).requires_grad_()
                with torch.enable_grad():
                    of_weights, of_inputs = torch.autograd.grad(run(weights, inputs), (weights, inputs), gradient)
                self.comm.all_reduce(of_weights, "gradient")
                return cut(of_weights, self.comm) / self.comm.world_size, of_inputs

        return Layer.apply(self.parts[number], inputs)

    def whole(self, part, number):
        parts, _ = self.comm.all_gather(part.detach(), "weights")
        return torch.cat(parts)[: self.elements[number]].clone()
"""
ANSWERS_LAYER = part_of(11, "\n        def gather_and_run", "\n    def step")
RIGHT = all_right(11, {"dealt_out": [(ZERO1, DEALT)], "recomputed": [(ANSWERS_LAYER, RECOMPUTED)]})
