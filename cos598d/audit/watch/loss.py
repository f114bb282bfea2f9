"""How much the mean loss of a micro-batch weighs in the tensor on which `backward` is called, read from its graph."""

from typing import Any

# These are a mean over examples unless they say that they sum (torch's Reduction: 0 none, 1 mean, 2 sum).
_MEAN = 1
_PASSING = ("ToCopyBackward0", "ViewBackward0", "UnsafeViewBackward0", "SqueezeBackward0", "SqueezeBackward1")
_DEEPEST = 16


def weight_of(loss: Any) -> float | None:
    """The factor f where the loss is f times a mean over examples; None where its graph does not tell.

    `loss / 4` has 1/4 of it, a sum of two means 2. What is a mean is known by torch's own losses and `mean`; a sum over
    examples, or a loss of another making, is not.
    """
    try:
        return _weight(loss.grad_fn, _DEEPEST)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # saved tensors may be gone, or be none
        return None


def _weight(node: Any, depth: int) -> float | None:
    if node is None or not depth:
        return None
    name = type(node).__name__
    below = [each for each, _ in node.next_functions]
    if name in _PASSING:
        return _weight(below[0], depth - 1)
    if name == "MeanBackward0":
        return 1.0
    if (reduction := getattr(node, "_saved_reduction", None)) is not None:
        return 1.0 if reduction == _MEAN else None
    if name == "NegBackward0":
        return _weight(below[0], depth - 1)
    if name == "AddBackward0":
        found = [_weight(each, depth - 1) for each in below if each is not None]
        return None if None in found or not found else sum(each for each in found if each is not None)
    if name in ("DivBackward0", "MulBackward0") and [each is None for each in below[1:]] in ([True], []):
        weight, factor = _weight(below[0], depth - 1), float(node._saved_other)
        if weight is None or factor == 0:
            return None
        return weight / factor if name == "DivBackward0" else weight * factor
    return None
