"""Lesson 7: gradients in buckets, as torch's DDP sends them."""

from cos598d.tools.learn.lesson import Lesson

LESSON = Lesson(
    number=7,
    name="buckets",
    title="buckets",
    minutes=60,
    question="Lesson 4 makes one call, and nothing of it is hidden; lesson 6 hides everything, and makes a call for "
    "every tensor. Take the middle, as DDP does: buckets of some size, each sent as soon as it is full.",
    contract={"Buckets": "class Buckets with __init__(self, comm, model, bucket_bytes) and finish(self)"},
    hints=(
        "Plan the buckets once, in __init__: go through the model's parameters that require a gradient, in reverse, "
        "and open a new bucket when the next one does not fit into the open one, or has another dtype. A parameter "
        "that is larger than a bucket gets one to itself. list(model.named_parameters()) has a tied weight once.",
        "A bucket is full when the hooks of all its parameters have come. Begin the full buckets in order, as in "
        "lesson 6: buffer = torch.cat([p.grad.flatten() for p in bucket]), then all_reduce(buffer, ..., "
        "async_op=True).",
        "finish(): buckets that have not begun have a parameter without a gradient. Put zeros there "
        "(p.grad = torch.zeros_like(p)), begin them, in order; then wait for all, divide, copy the parts back into "
        "each .grad, and count from zero again.",
    ),
    checks="lesson7",
    read="cos598d/sync/bucketed.py: there .grad is a view of the bucket, and nothing is copied back. Then Li et al., "
    '"PyTorch Distributed", VLDB 2020, section 3.2.',
    measure="python -m cos598d bench --sweep bucket_mb --model minilm --world_size 4",
)
