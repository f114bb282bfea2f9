"""Lesson 10: fewer bytes, by rows that nobody looked up and by elements that may wait."""

from cos598d.tools.learn.lesson import Lesson

LESSON = Lesson(
    number=10,
    name="send_less",
    title="send less",
    minutes=50,
    question="Most of a word embedding's gradient is zeros: send the rows that some rank looked up, and nothing else. "
    "Of other gradients send the largest elements, and add what you held back to the next step's. What is lost?",
    contract={
        "average_rows": "average_rows(comm, gradient, ids), which averages an embedding's gradient in place",
        "TopK": "TopK(comm, share), whose average(name, gradient) sends the largest elements",
    },
    hints=(
        "Part 1: a tensor of uint8 with a 1 for each word that this rank looked up, all-reduced with ReduceOp.MAX, is "
        "the same on all ranks afterwards; .nonzero().flatten() of it are the rows, in one order on every rank. "
        "gradient[rows] is a copy: put the result back.",
        "Part 2: keep a dictionary from names to what is held back. With whole = gradient + held back: "
        "places = whole.abs().topk(k).indices, values = whole[places], and held back is whole with zeros at places.",
        "Part 2: all-gather values and places.int(); start from gradient.zero_(), and for each rank's pair add the "
        "values at their places: gradient[places.long()] += values. The places of one rank are all different.",
    ),
    checks="lesson10",
    read="cos598d/sync/sparse_rows.py, cos598d/sync/codecs/topk.py, and Feedback in cos598d/sync/codecs/base.py.",
    measure="python -m cos598d bench --sync bucketed,sparse_rows,bucketed+topk --model minilm --world_size 4",
    ranks=(3, 2),
)
