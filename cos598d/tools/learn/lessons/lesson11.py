"""Lesson 11: an n-th of the optimizer's state, then of the weights as well."""

from cos598d.tools.learn.lesson import Lesson

LESSON = Lesson(
    number=11,
    name="hold_less",
    title="hold less",
    minutes=60,
    question="Every rank holds all weights and all of AdamW's state, n times the same. Let each rank step an n-th of "
    "the weights; then let it hold no more than that n-th either. How many bytes more does it take?",
    contract={
        "Zero1": "Zero1(comm, model, make_optimizer), whose step() comes after backward",
        "Zero3": "Zero3(comm, layers, make_optimizer), with layer(number, run, inputs) and step()",
    },
    hints=(
        "Put all weights into one flat tensor with torch.cat, filled up with zeros to a multiple of n elements; rank "
        "r's part is [r * size : (r + 1) * size], as a .clone(). That one tensor is what the optimizer gets, and its "
        ".grad is the same part of the flat average.",
        "After the step all-gather the part: torch.cat of what comes, cut to the number of weights, split by "
        "p.numel(), goes back by p.data.copy_(...). Make the optimizer once, in __init__: its state is what counts.",
        "Zero3.layer: define a function of (part, inputs) that calls Gathered.apply(part, self.comm), cuts off the "
        "filling and calls run; return checkpoint(that function, self.parts[number], inputs, use_reentrant=False). The "
        "parts need requires_grad_(); Gathered.backward: all-reduce, divide by n, return this rank's part.",
    ),
    checks="lesson11",
    read="cos598d/strategies/zero1.py, then cos598d/strategies/zero3.py; "
    "`python -m cos598d prove zero1 zero3` proves both.",
    measure="python -m cos598d bench --step --sync bucketed,zero1,zero3 --model tiny --world_size 4",
    ranks=(3, 2),
)
