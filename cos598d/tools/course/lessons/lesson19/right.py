"""The right rates and noise scale of lesson 19, and those of typical mistakes."""

from collections.abc import Callable, Sequence
from typing import Any

POWERS = {"linear": 1.0, "sqrt": 0.5}  # of the batch's growth

Pairs = Sequence[tuple[float, float]]


def scaled_rate(rate: float, batch: int, large: int, rule: str) -> float:
    """The rate times the batch's growth, or times its square root."""
    return rate * (large / batch) ** POWERS[rule]


def warm_up(step: int, steps: int, start: float, peak: float) -> float:
    """From `start` to `peak` by equal parts."""
    return peak if step >= steps else start + (peak - start) * step / steps


def noise_scale(pairs: Pairs) -> float | None:
    """The ratio of the means; None where that of |G|^2 is not positive."""
    signal, noise = (sum(each) for each in zip(*pairs, strict=True))
    return noise / signal if signal > 0 else None


# By function: what is said of the results of a mistake.
MISTAKES: dict[str, dict[str, Callable[..., Any]]] = {
    "scaled_rate": {
        "that is by the square root rule": lambda r, b, large, rule: scaled_rate(r, b, large, "sqrt"),
        "that is by the linear rule": lambda r, b, large, rule: scaled_rate(r, b, large, "linear"),
        "that is upside down: the rate grows with the batch": lambda r, b, large, rule: scaled_rate(r, large, b, rule),
        "that is the rate itself": lambda r, b, large, rule: r,
        "large is the batch, and not how many times larger it is": (
            lambda r, b, large, rule: scaled_rate(r, 1, large, rule)
        ),
        "large / batch is no whole number: do not round it": (
            lambda r, b, large, rule: scaled_rate(r, 1, large // b, rule)
        ),
    },
    "warm_up": {
        "count from 0: step 0 has start": lambda k, steps, a, b: a + (b - a) * (k + 1) / max(steps, 1),
        "it begins with start, and not with 0": lambda k, steps, a, b: b * min(k / max(steps, 1), 1.0),
        "that is a step of a warm-up from 0": lambda k, steps, a, b: b * (k + 1) / max(steps, 1),
        "peak comes in step `steps`, one later": (
            lambda k, steps, a, b: b if k >= steps - 1 else a + (b - a) * k / (steps - 1)
        ),
        "it goes on after the warm-up: it stays at peak": lambda k, steps, a, b: a + (b - a) * k / max(steps, 1),
        "add the same amount in every step, and do not multiply": (
            lambda k, steps, a, b: a * (b / a) ** (k / max(steps, 1))
        ),
    },
    "noise_scale": {
        "that is the mean of the ratios; take the ratio of the means of all steps": (
            lambda pairs: sum(s / g for g, s in pairs) / len(pairs)
        ),
        "that is upside down": lambda pairs: sum(g for g, _ in pairs) / sum(s for _, s in pairs),
        "that is the last step's ratio; take the ratio of the means of all steps": (
            lambda pairs: pairs[-1][1] / pairs[-1][0]
        ),
        "steps with a negative |G|^2 count too": lambda pairs: noise_scale([each for each in pairs if each[0] > 0]),
        "there is none where the mean |G|^2 is negative": (
            lambda pairs: sum(s for _, s in pairs) / sum(g for g, _ in pairs)
        ),
    },
}
