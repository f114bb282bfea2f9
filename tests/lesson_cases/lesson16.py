"""Lesson 16 as students write it: changes of the answer that are wrong, with what the check must print, and right ones."""

from lesson_cases import all_right, all_wrong, part_of

CAST = """    with torch.autocast("cpu", dtype=dtype):
        outputs = model(inputs)
    return (outputs.float() - targets).square().mean()
"""
MEAN = part_of(16, "    mean = gradient", "\n\nclass")
BACKWARD = "        (loss * self.scale).backward()\n"
AVERAGE = """        for gradient in gradients:
            self.comm.all_reduce(gradient, "gradient")
            gradient /= self.comm.world_size * self.scale
"""
FINITE = "        if all(gradient.isfinite().all() for gradient in gradients):\n"
STEP = """            for p, gradient in zip(self.parameters, gradients):
                p.data -= self.rate * gradient
"""
HALVE = """            self.good = 0
            self.scale /= 2
"""
GROW = """        if self.good == self.patience:
            self.good = 0
            self.scale *= 2
"""
EMPTY = """        for p in self.parameters:
            p.grad = None
"""
LOOKS_FIRST = "        finite = all(gradient.isfinite().all() for gradient in gradients)\n" + AVERAGE

WRONG = all_wrong(16, {
    "no autocast": ([(CAST, "    return (model(inputs) - targets).square().mean()\n")], "products are in float32, expected bfloat16"),
    "always bf16": ([("dtype=dtype", "dtype=torch.bfloat16")], "in fp16: products are in bfloat16, expected float16"),
    "the weights are cast": ([(CAST, "    outputs = model.to(dtype)(inputs.to(dtype))\n    return (outputs.float() - targets).square().mean()\n")], "the weights became bfloat16"),
    "the loss in 16 bits": ([("(outputs.float() - targets)", "(outputs - targets.to(dtype))")], "the loss is in bfloat16: compute it in float32"),
    "summed, not averaged": ([("square().mean()", "square().sum()")], "in bf16: the loss is"),
    "sum in 16 bits": ([(MEAN, '    comm.all_reduce(gradient, "gradient")\n    return gradient.float() / comm.world_size\n')], "the sum was made in 16 bits"),
    "divided first": ([(MEAN, '    mean = (gradient / comm.world_size).float()\n    comm.all_reduce(mean, "gradient")\n    return mean\n')], "where small numbers become 0: divide after the sum"),
    "a sum": ([("    mean /= comm.world_size\n", "")], "that is the sum: divide by the number of ranks"),
    "rounded again": ([("    return mean\n", "    return mean.to(gradient.dtype)\n")], "that is the average rounded to 16 bits"),
    "given nothing": ([("    return mean\n", "    gradient.copy_(mean)\n")], "gives NoneType, expected a float32 tensor"),
    "not scaled": ([(BACKWARD, "        loss.backward()\n")], "small gradients became 0: backward multiplies the loss"),
    "not unscaled": ([("self.comm.world_size * self.scale", "self.comm.world_size")], "the gradients are still scaled"),
    "no scale at all": ([(BACKWARD, "        loss.backward()\n"), ("self.comm.world_size * self.scale", "self.comm.world_size")], "small gradients became 0"),
    "a sum over the ranks": ([("self.comm.world_size * self.scale", "self.scale")], "the gradients are the sum over the ranks"),
    "own gradients": ([('            self.comm.all_reduce(gradient, "gradient")\n            gradient /= self.comm.world_size * self.scale\n', "            gradient /= self.scale\n")], "those of one rank"),
    "never left out": ([(FINITE, "        if True:\n")], "the step is made although a gradient is inf"),
    "each parameter by itself": (
        [(FINITE, "        for p, gradient in zip(self.parameters, gradients):\n            if gradient.isfinite().all():\n                p.data -= self.rate * gradient\n" + FINITE), (STEP, "")],
        "only the parameter whose gradient is inf is left out",
    ),
    "inf replaced": ([("        for gradient in gradients:\n", "        for gradient in gradients:\n            gradient.nan_to_num_(0.0, 0.0, 0.0)\n")], "inf was replaced and the step was made"),
    "one rank alone leaves out": ([(AVERAGE, LOOKS_FIRST), (FINITE, "        if finite:\n")], "only the rank whose gradient was inf leaves out the step"),
    "one rank makes no call": (
        [(AVERAGE, "        if not all(gradient.isfinite().all() for gradient in gradients):\n            self.scale /= 2\n            return\n" + AVERAGE)],
        "lesson16.py",
    ),
    "never halved": ([("            self.scale /= 2\n", "            pass\n")], "the scale is not halved"),
    "never doubled": ([(GROW, "")], "the scale never grows"),
    "doubled each time": ([("if self.good == self.patience:", "if self.good:")], "the scale grows after each good step"),
    "good steps in all": ([(HALVE, "            self.scale /= 2\n")], "good steps are counted from the start"),
    "grows from then on": ([(GROW, "        if self.good >= self.patience:\n            self.scale *= 2\n")], "the scale grows in each step: count from 0 again"),
    "inf but not NaN": ([(FINITE, "        if not any(gradient.isinf().any() for gradient in gradients):\n")], "inf - inf is NaN"),
    "NaN but not inf": ([(FINITE, "        if not any(gradient.isnan().any() for gradient in gradients):\n")], "not only for NaN"),
    "doubled once": ([(GROW, "        if self.good == self.patience:\n            self.scale *= 2\n")], "doubles only once in a row of good steps"),
    "doubled one step late": ([("if self.good == self.patience:", "if self.good > self.patience:")], "one step late"),
    "added up in 16 bits": ([(MEAN, '    mean = gradient / comm.world_size\n    comm.all_reduce(mean, "gradient")\n    return mean.float()\n')], "rounded to 16 bits: add up, divide and leave it in float32"),
    "unscaled in 16 bits": ([(AVERAGE, AVERAGE.replace("* self.scale\n", "\n            gradient.copy_(gradient.half() / self.scale)\n"))], "is divided by it in float32"),
    "gradients kept": ([(EMPTY, "")], "the gradients of the step before are added"),
    "the page's sum": ("lesson16.py.txt", "the sum was made in 16 bits"),
    "the page's step": ("lesson16-own.py.txt", "only the rank whose gradient was inf"),
})  # fmt: skip

IN_AUTOCAST = """    with torch.autocast("cpu", dtype=dtype):
        return torch.nn.functional.mse_loss(model(inputs), targets)
"""
DOUBLE = """    total = gradient.to(torch.float32).clone()
    call = comm.all_reduce(total, "total", async_op=True)
    call.wait()
    return total.div(comm.world_size)
"""
AGREES = """        bad = torch.tensor([float(not all(p.grad.isfinite().all() for p in self.parameters))])
        self.comm.all_reduce(bad, "overflow")
        if bad.item():
            self.scale, self.good = self.scale * 0.5, 0
            for p in self.parameters:
                p.grad = None
            return
        flat = torch.cat([p.grad.flatten() for p in self.parameters]) / self.scale
        self.comm.all_reduce(flat, "gradients")
        flat = flat / self.comm.world_size
        with torch.no_grad():
            for p, part in zip(self.parameters, flat.split([p.numel() for p in self.parameters])):
                p.sub_(part.view_as(p), alpha=self.rate)
                p.grad = None
        self.good += 1
        if self.good % self.patience == 0:
            self.scale *= 2
"""
WHOLE_STEP = part_of(16, "        gradients = [p.grad")
GRAD_SCALER = """        for p in self.parameters:
            self.comm.all_reduce(p.grad, "gradient")
            p.grad /= self.comm.world_size
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scale = self.scaler.get_scale()
        self.optimizer.zero_grad()
"""
RIGHT = all_right(16, {
    "in autocast": [(CAST, IN_AUTOCAST)],
    "inf and NaN one by one": [(FINITE, "        if not any((gradient.isinf() | gradient.isnan()).any() for gradient in gradients):\n")],
    "finite less itself": [(FINITE, "        if all((gradient - gradient == 0).all() for gradient in gradients):\n")],
    "finite by its sum": [(FINITE, "        if torch.stack([gradient.sum() for gradient in gradients]).sum().isfinite():\n")],
    "by hand": [(MEAN, DOUBLE)],
    "agrees first": [(WHOLE_STEP, AGREES)],
    "torch's GradScaler": [
        ("        self.good = 0\n\n", '        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=patience)\n        self.optimizer = torch.optim.SGD(self.parameters, lr=rate)\n\n'),
        (BACKWARD, "        self.scaler.scale(loss).backward()\n"),
        (WHOLE_STEP, GRAD_SCALER),
    ],
})  # fmt: skip
