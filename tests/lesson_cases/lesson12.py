"""Lesson 12 as students write it: changes of the answer that are wrong, with what the check must print, and right ones."""

from lesson_cases import all_right, all_wrong

COUNT = """        self.steps += 1
        if self.steps % self.every:
            return
"""
AVERAGE = """        average = self.flat()
        self.comm.all_reduce(average, "weights")
        average /= self.comm.world_size
"""
MOMENTUM = "self.momentum = self.outer_momentum * self.momentum + moved"
AGREED = "        self.agreed = self.agreed - self.outer_rate * (moved + self.outer_momentum * self.momentum)\n"
PUT_BACK = """        for p, part in zip(self.weights, parts):
            p.data.copy_(part.view_as(p))
"""
TENSOR_BY_TENSOR = """        for p in self.weights:
            self.comm.all_reduce(p.data, "weight")
            p.data /= self.comm.world_size
        average = self.flat()
"""

WRONG = all_wrong(12, {
    "every_step": ([("        if self.steps % self.every:\n            return\n", "")], "makes 1 call after step 1, expected none"),
    "round_too_early": ([(COUNT, "        self.steps += 1\n        if (self.steps - 1) % self.every:\n            return\n")], "makes 1 call after step 1, expected none"),
    "summed": ([("        average /= self.comm.world_size\n", "")], "the sum over the ranks"),
    "tensor_by_tensor": ([(AVERAGE, TENSOR_BY_TENSOR)], "makes 4 calls in the round after step 3, expected 1"),
    "frozen_too": ([("if p.requires_grad]", "]")], "weights that do not train are sent too"),
    "wrong_way": ([("moved = self.agreed - average", "moved = average - self.agreed")], "goes the wrong way"),
    "heavy_ball": ([("(moved + self.outer_momentum * self.momentum)", "self.momentum")], "does not look ahead"),
    "momentum_forgotten": ([("        self.momentum = self.outer_momentum * self.momentum + moved\n", "        self.momentum = moved\n")], "does not build up"),
    "agreed_stays": ([(AGREED, AGREED.replace("self.agreed =", "agreed =")), ("self.agreed.split", "agreed.split")], "stay what they were at the start"),
    "agreed_is_the_model": ([("average = self.flat()\n", "average = self.flat()\n        self.agreed = average.clone()\n")], "keep a copy (clone)"),
    "not_put_back": ([(PUT_BACK, "        del parts\n")], "put the agreed weights back"),
    "not_averaged": ([("        self.comm.all_reduce(average, \"weights\")\n        average /= self.comm.world_size\n", "        self.comm.all_reduce(average.clone(), \"weights\")\n")], "were not averaged over the ranks"),
    "gradients_averaged": ([("p.data.flatten() for p", "(p.data if p.grad is None else p.grad).flatten() * 0 for p")], "element "),
})  # fmt: skip

# torch's own optimizer takes the outer step; what travels is how far a rank has moved, not where it is.
BY_TORCH = """        self.outer.param_groups[0]["params"][0].grad = moved
        self.outer.step()
        self.agreed = self.outer.param_groups[0]["params"][0].detach()
"""
RIGHT = all_right(12, {
    "torch_takes_the_step": [
        ("        self.momentum = torch.zeros_like(self.agreed)\n", "        self.outer = torch.optim.SGD([self.agreed], lr=outer_rate, momentum=outer_momentum, nesterov=outer_momentum > 0)\n"),
        (f"        {MOMENTUM}\n{AGREED}", BY_TORCH),
    ],
    "moved_travels": [
        (AVERAGE, ""),
        ("        moved = self.agreed - average\n", "        moved = (self.agreed - self.flat()) / self.comm.world_size\n        self.comm.all_reduce(moved, \"moved\")\n"),
    ],
})  # fmt: skip
