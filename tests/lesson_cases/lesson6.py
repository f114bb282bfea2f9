"""Lesson 6: while backward runs."""

ANSWER = """class Averager:
    def __init__(self, comm, parameters):
        self.comm, self.order = comm, parameters[::-1]
        self.ready, self.calls = set(), []
        for _, parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self.on_gradient)

    def on_gradient(self, parameter):
        self.ready.add(parameter)
        while len(self.calls) < len(self.order) and self.order[len(self.calls)][1] in self.ready:
            name, p = self.order[len(self.calls)]
            self.calls.append(self.comm.all_reduce(p.grad, name, async_op=True))

    def finish(self):
        for call in self.calls:
            call.wait()
        for _, parameter in self.order:
            parameter.grad /= self.comm.world_size
        self.ready, self.calls = set(), []
"""
AS_THEY_COME = """class Averager:
    def __init__(self, comm, parameters):
        self.comm, self.parameters, self.calls = comm, parameters, []
        for name, parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self.begin(p, name))

    def begin(self, parameter, name):
        self.calls.append(self.comm.all_reduce(parameter.grad, name, async_op=True))  #!

    def finish(self):
        for call in self.calls:
            call.wait()
        for _, parameter in self.parameters:
            parameter.grad /= self.comm.world_size
        self.calls = []
"""
RIGHT = {
    "copies that are divided first": """import torch

class Averager:
    def __init__(self, comm, parameters):
        self.comm = comm
        self.order = [p for _, p in reversed(parameters)]
        self.waiting = list(self.order)
        self.there, self.calls = [], []
        for p in self.order:
            p.register_post_accumulate_grad_hook(self.hook)

    def hook(self, p):
        self.there.append(id(p))
        while self.waiting and id(self.waiting[0]) in self.there:
            q = self.waiting.pop(0)
            buffer = q.grad / self.comm.world_size
            self.calls.append((q, buffer, self.comm.all_reduce(buffer, async_op=True)))

    def finish(self):
        for q, buffer, call in self.calls:
            call.wait()
            q.grad = buffer
        self.waiting, self.there, self.calls = list(self.order), [], []
""",
    "in the order of registration": """class Averager:
    def __init__(self, comm, parameters):
        self.comm, self.parameters = comm, parameters
        self.place = {p: i for i, (_, p) in enumerate(parameters)}
        # The last layers in pairs, so that a pair is a unit.
        self.units = [parameters[i : i + 2] for i in range(0, len(parameters), 2)][::-1]
        self.reset()
        self.handles = [p.register_post_accumulate_grad_hook(self.mark) for _, p in parameters]

    def reset(self):
        self.done = [False] * len(self.parameters)
        self.started = 0
        self.calls = []

    def mark(self, p):
        self.done[self.place[p]] = True
        while self.started < len(self.units) and all(self.done[self.place[q]] for _, q in self.units[self.started]):
            for name, q in self.units[self.started]:
                self.calls.append(self.comm.all_reduce(q.grad, name, async_op=True))
            self.started += 1

    def finish(self):
        [call.wait() for call in self.calls]
        for _, p in self.parameters:
            p.grad.mul_(1 / self.comm.world_size)
        self.reset()
""",
}
WRONG = {
    "divides while the call is under way": (
        ANSWER.replace(
            "            self.calls.append(self.comm.all_reduce(p.grad, name, async_op=True))",
            "            self.calls.append(self.comm.all_reduce(p.grad, name, async_op=True))  #!\n"
            "            p.grad /= self.comm.world_size",
        ).replace("            parameter.grad /= self.comm.world_size", "            pass"),
        "was changed while the call was under way: wait for the call first",
    ),
    "an endless loop when all is begun": (
        # In one line, for it may be stopped in either.
        ANSWER.replace("            call.wait()", "            while call: pass  #!"),
        "rank 0 came to no end",
    ),
    "calls for nothing while backward runs": (
        ANSWER.replace(
            "all_reduce(p.grad, name, async_op=True)", "all_reduce(p.grad.clone(), name, async_op=True)"
        ).replace(
            "            parameter.grad /=",
            "            self.comm.all_reduce(parameter.grad, _)\n            parameter.grad /=",
        ),
        "bytes of calls",
    ),
    "small calls for nothing while backward runs": (
        ANSWER.replace(
            "all_reduce(p.grad, name, async_op=True)", "all_reduce(p.grad[:1].clone(), name, async_op=True)"
        ).replace(
            "            parameter.grad /=",
            "            self.comm.all_reduce(parameter.grad, _)\n            parameter.grad /=",
        ),
        "bytes of gradients",
    ),
    "in the order of arrival": (AS_THEY_COME, "every rank must make the same calls in the same order"),
    "all in finish": (
        """class Averager:
    def __init__(self, comm, parameters):
        self.comm, self.parameters = comm, parameters

    def finish(self):
        for name, parameter in self.parameters:
            self.comm.all_reduce(parameter.grad, name)  #!
            parameter.grad /= self.comm.world_size
""",
        "0 of 13 calls before backward ends",
    ),
    "all begun by the last hook": (
        ANSWER.replace("self.order[len(self.calls)][1] in self.ready:", "len(self.ready) == len(self.order):"),
        "begins call 1 of 13 when 13 of 13 gradients are there",
    ),
    "from the first layer on": (
        ANSWER.replace("comm, parameters[::-1]", "comm, parameters"),
        "from the last layer to the first",
    ),
    "waits in the hook": (
        ANSWER.replace(
            "self.calls.append(self.comm.all_reduce(p.grad, name, async_op=True))",
            "call = self.comm.all_reduce(p.grad, name, async_op=True); call.wait(); self.calls.append(call)",
        ),
        "waits for all_reduce of last.bias while backward runs",
    ),
    "blocks in the hook": (
        ANSWER.replace(
            "self.calls.append(self.comm.all_reduce(p.grad, name, async_op=True))",
            "self.comm.all_reduce(p.grad, name); self.calls.append(None)",
        ).replace("call.wait()", "pass"),
        "waits for all_reduce of last.bias while backward runs",
    ),
    "never waits": (
        ANSWER.replace("            call.wait()", "            pass"),
        "is never waited for",
    ),
    "takes the weight for its gradient": (
        ANSWER.replace("all_reduce(p.grad,", "all_reduce(p.data,"),
        "was changed: only its gradient may change",
    ),
    "divides in the hook": (
        ANSWER.replace(
            "        self.ready.add(parameter)",
            "        parameter.grad /= self.comm.world_size\n        self.ready.add(parameter)",
        ),
        "divide once",
    ),
    "never divides": (
        ANSWER.replace("parameter.grad /= self.comm.world_size", "pass"),
        "is the sum over 2 ranks, not their average",
    ),
    "forgets to begin again": (
        ANSWER.replace("        self.ready, self.calls = set(), []\n", "", 1)
        .replace(
            "        for _, parameter in parameters:",
            "        self.ready, self.calls = set(), []\n        for _, parameter in parameters:",
        )
        .removesuffix("        self.ready, self.calls = set(), []\n"),
        "right for the first 1 step only",
    ),
    "one name for all hooks": (
        AS_THEY_COME.replace("lambda p, name=name: self.begin(p, name)", "lambda p: self.begin(parameter, name)"),
        "comm.all_reduce was given None, expected a tensor",
    ),
}
