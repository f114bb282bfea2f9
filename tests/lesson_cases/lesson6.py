"""Lesson 6 as students write it: changes of the answer that are wrong, with what the check must print, and right files."""

from lesson_cases import all_wrong

CALL = "self.comm.all_reduce(following.grad, name, async_op=True)"
BEGIN = f"            self.calls.append({CALL})\n"
ORDERED = """        while len(self.calls) < len(self.order) and self.order[len(self.calls)][1] in self.ready:
            name, following = self.order[len(self.calls)]
"""
HOOKS = "            parameter.register_post_accumulate_grad_hook(self.on_gradient)\n"
WAIT = "            call.wait()\n"
DIVIDE = "            parameter.grad /= self.comm.world_size\n"
AGAIN = "        for call in self.calls:\n            call.wait()\n        for _, parameter in self.order:\n" + DIVIDE
FOR_NOTHING = (DIVIDE, "            self.comm.all_reduce(parameter.grad, _)\n" + DIVIDE)
ON_GRADIENT = "    def on_gradient(self, parameter):\n        self.ready.add(parameter)\n" + ORDERED + BEGIN
AS_THEY_COME = [
    (HOOKS, HOOKS.replace("self.on_gradient", "lambda p, name=_: self.on_gradient(p, name)")),
    (
        ON_GRADIENT,
        "    def on_gradient(self, parameter, name):\n        self.calls.append(self.comm.all_reduce(parameter.grad, name, async_op=True))  #!\n",
    ),
]
FIRST_NAME = [AS_THEY_COME[1], (HOOKS, HOOKS.replace("self.on_gradient", "lambda p: self.on_gradient(parameter, _)"))]
IN_FINISH = (
    "        for name, parameter in self.order:\n            self.comm.all_reduce(parameter.grad, name)  #!\n" + DIVIDE
)

WRONG = all_wrong(6, {
    "divides while the call is under way": (
        [(BEGIN, BEGIN.replace("\n", "  #!\n") + "            following.grad /= self.comm.world_size\n"), (DIVIDE, "            pass\n")],
        "was changed before the call had ended: wait for the call first",
    ),
    # In one line, for it may be stopped in either.
    "an endless loop when all is begun": ([(WAIT, "            while call: pass  #!\n")], "rank 0 did not end"),
    "calls for nothing while backward runs": ([(CALL, CALL.replace("grad,", "grad.clone(),")), FOR_NOTHING], "bytes of calls"),
    "small calls for nothing while backward runs": ([(CALL, CALL.replace("grad,", "grad[:1].clone(),")), FOR_NOTHING], "bytes of gradients"),
    "in the order of arrival": (AS_THEY_COME, "every rank must make the same calls in the same order"),
    "all in finish": ([(HOOKS, "            pass\n"), (AGAIN, IN_FINISH)], "0 of 13 calls before backward ends"),
    "all begun by the last hook": ([("self.order[len(self.calls)][1] in self.ready:", "len(self.ready) == len(self.order):")], "begins call 1 of 13 when 13 of 13 gradients are there"),
    "from the first layer on": ([("comm, parameters[::-1]", "comm, parameters")], "from the last layer to the first"),
    "waits in the hook": ([(BEGIN, f"            call = {CALL}; call.wait(); self.calls.append(call)\n")], "waits for all_reduce of last.bias while backward runs"),
    "never waits": ([(WAIT, "            pass\n")], "is never waited for"),
    "takes the weight for its gradient": ([("all_reduce(following.grad,", "all_reduce(following.data,")], "was changed: only its gradient may change"),
    "divides in the hook": (
        [("        self.ready.add(parameter)\n", "        parameter.grad /= self.comm.world_size\n        self.ready.add(parameter)\n")], "divide only once",
    ),
    "never divides": ([(DIVIDE, "            pass\n")], "is the sum over 2 ranks, not their average"),
    "forgets to begin again": ([(DIVIDE + "        self.begin()\n", DIVIDE)], "right only for the first 1 step"),
    "one name for all hooks": (FIRST_NAME, "comm.all_reduce was given None, expected a tensor"),
})  # fmt: skip

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
}
