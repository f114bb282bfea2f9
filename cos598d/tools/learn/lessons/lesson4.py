"""Lesson 4: all gradients in one buffer, so that one call is enough."""

from cos598d.tools.learn.lesson import Lesson

LESSON = Lesson(
    number=4,
    name="flat",
    title="one call instead of 105",
    minutes=30,
    question="A BERT of six layers has 105 gradients, and lesson 3 makes 105 calls, each of which waits for its "
    "2(n-1) messages. Put the gradients side by side into one buffer for each dtype, and average that in one call.",
    contract={
        "average_all": "average_all(comm, gradients), with gradients a list of (name, tensor), averaged in place"
    },
    hints=(
        "torch.cat([tensor.flatten() for tensor in tensors]) makes one long tensor; buffer.split(sizes) cuts it again, "
        "with sizes = [tensor.numel() for tensor in tensors].",
        "torch.cat of a float32 and a float64 makes everything float64: twice the bytes. First sort the tensors by "
        "tensor.dtype, for example into a dictionary of lists. A dictionary keeps its order, a set does not.",
        "At the end each part goes back where it came from: tensor.copy_(part.view_as(tensor)).",
    ),
    checks="lesson4",
    read="cos598d/sync/flat.py and cos598d/sync/buckets.py: gradients that stay in the buffer need not be copied back.",
    measure="python -m cos598d bench --sync all_reduce,flat --model minilm --world_size 4",
    ranks=(2, 3, 4),
)
