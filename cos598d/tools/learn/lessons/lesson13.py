"""Lesson 13: what a record says, and what it does not."""

from cos598d.tools.learn.lesson import Lesson

LESSON = Lesson(
    number=13,
    name="measure_honestly",
    title="measure honestly",
    minutes=45,
    question="Six records, eight claims about them. Compute ratios, what is exposed, and intervals, and say of each "
    "claim whether it holds, does not hold, or why the record cannot say.",
    contract={
        "interval": "interval(values), the 95 % interval of a median, or None",
        "ratio": "ratio(record, one, other), the median of the ratios within rounds, and its interval",
        "exposed": "exposed(record, one), the median of the seconds above the floor, and its interval, or None",
        "verdicts": "verdicts(), a dictionary from a claim's number to what you say of it",
    },
    hints=(
        "math.comb(n, j) / 2**n is the probability of j heads in n tosses. Add them up from j = 0 while twice the sum "
        "is at most 0.05: k is how many you could add. For 6 to 8 values it is 1, for 9 to 11 it is 2, for 15 it is 4.",
        "ratio: one list of a / b for the pairs of zip(seconds[one], seconds[other]); its median and its interval. Not "
        "the ratio of the medians.",
        "Ask in this order: Is it the same work, by `setting`? Is the floor there, and is it what it was elsewhere? "
        "Are there 6 rounds? On which side of 1, of 0, or of the claim's number do both ends of the interval lie?",
    ),
    checks="lesson13",
    read="cos598d/records/summary.py, cos598d/tools/report/fairness.py and docs/report.md. `report` shows a bench.",
    measure="python -m cos598d bench --sync bucketed --model tiny --rounds 15 --output runs/mine",
    ranks=(1,),
)
