"""Lesson 6: calls that start while backward still runs."""

from cos598d.tools.learn.lesson import Lesson

LESSON = Lesson(
    number=6,
    name="overlap",
    title="while backward runs",
    minutes=60,
    question="Backward computes the last layer's gradient first. Send it then, while backward goes on with the layers "
    "below: hooks begin the calls, finish() waits for them.",
    contract={"Averager": "class Averager with __init__(self, comm, parameters) and finish(self)"},
    hints=(
        "parameter.register_post_accumulate_grad_hook(hook) calls hook(parameter) when parameter.grad is complete. "
        "Begin there: call = self.comm.all_reduce(parameter.grad, name, async_op=True), keep the call, and wait for "
        "it in finish(). In a loop give the hook its own name: lambda parameter, name=name: ...",
        "Ranks match calls by their order alone, so all ranks need one order. Backward's own differs from rank to rank "
        "where a model has branches. Fix one beforehand, the reverse of `parameters`, and begin a call only when all "
        "those before it have begun; what comes early waits.",
        "Keep self.ready, a set, and self.next, a place in the order. A hook adds its parameter to ready; then: while "
        "the parameter at self.next is ready, begin its call and go one place on. finish() waits for all calls, "
        "divides, and sets both back for the next step.",
    ),
    checks="lesson6",
    read="cos598d/sync/overlap.py and cos598d/sync/parts/overlapping.py, which also knows no_sync and unused "
    "parameters.",
    measure="python -m cos598d bench --sync all_reduce,overlap --model minilm --world_size 4 --trace traces",
)
