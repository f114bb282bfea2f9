"""Lesson 8: six loops with a fault each, to be mended until an audit finds nothing."""

from cos598d.tools.learn.lesson import Lesson

LESSON = Lesson(
    number=8,
    name="what_goes_wrong",
    title="what goes wrong",
    minutes=40,
    question="Six training loops run without a complaint, and none of them trains as one process would. Find the fault "
    "of each, and mend it.",
    contract={
        f"{name}_loop": f"{name}_loop(rank, ranks, model, inputs, labels), mended"
        for name in ("first", "second", "third", "fourth", "fifth", "sixth")
    },
    hints=(
        "What must the optimizer see? The average over the ranks of the gradients of different examples, clipped once "
        "it is the average. Two of the loops do these things in another order, or average something else.",
        "Under no_sync() DDP averages nothing, neither then nor later: the last part of a step has to be outside of "
        "it. And .grad is added to: whoever does not set it back has the steps before in it.",
        "With shares of 6 and 5 examples the mean of both means is not that of the 11. Multiply a rank's loss by "
        "ranks * len(batch) / 11, so that the average over the ranks gives every example the same weight.",
    ),
    checks="lesson8",
    read="docs/audit.md; tests/audit_cases.py has each fault that is known, as a change of a script.",
    measure="python -m cos598d audit --world_size 2 -- task2b/run_glue.py --model_name_or_path tiny",
    ranks=(2, 4),
)
