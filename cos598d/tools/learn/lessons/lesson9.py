"""Lesson 9: bytes and seconds predicted from rate, delay and the number of ranks."""

from cos598d.tools.learn.lesson import Lesson

LESSON = Lesson(
    number=9,
    name="wire",
    title="the wire",
    minutes=30,
    question="A link has a rate and a delay. How many bytes does a rank send, and how many seconds does it take, "
    "through rank 0, from everyone to everyone, and round a ring? And how much of it does backward hide?",
    contract={
        "sent": "sent(way, size, ranks, rank), the bytes that a rank sends to average a tensor",
        "seconds": "seconds(way, size, ranks, rate, delay), the seconds that it takes",
        "step_seconds": "step_seconds(buckets, backward, ranks, rate, delay), of buckets that travel beside backward",
    },
    hints=(
        "A byte has eight bits. Rank 0 of gather_scatter carries n-1 tensors, but in each of its two phases the "
        "messages are under way together: their bytes share its link, and the delay counts once a phase.",
        "In a ring nothing is shared: in each of the 2(n-1) steps a link carries one n-th of the tensor, and the next "
        "step waits for it. So both the bytes and the delay count 2(n-1) times.",
        "Beside backward keep the moment at which the link is free. A bucket begins when the link is free and its "
        "gradients are there, whichever is later; the answer is the last end, or backward's if that is later.",
    ),
    checks="lesson9",
    read="cos598d/comm/gloo.py, cos598d/sync/cost.py and cos598d/scale/model.py: the same, call by call. "
    "Then, as root, set what your functions say beside what four emulated hosts take.",
    measure="python -m cos598d cluster run --rate 100mbit --delay 10ms -- python -m cos598d bench --sync "
    "gather_scatter,ring,bucketed --model tiny --rounds 3",
    ranks=(1,),
)
