"""The weight of a micro-batch's examples in the tensor on which `backward` is called, from its graph."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

# What torch's losses do with the examples (torch's Reduction).
_NONE, _MEAN, _SUM = 0, 1, 2
_PASSING = ("ToCopyBackward0", "ViewBackward0", "UnsafeViewBackward0", "SqueezeBackward0", "SqueezeBackward1")
_PICKING = ("IndexBackward0", "MaskedSelectBackward0")
_DEEPEST = 200  # a sum of many terms is as deep as it is long


class Scale(NamedTuple):
    """The loss is `weight` times a mean over examples, or times a sum over them; None if the graph does not show it."""

    weight: float | None
    examples: float = 0.0  # without those that the loss ignores; 0 if they are not known
    is_sum: bool = False
    multiplied: tuple[float, ...] = ()  # by these numbers on the way: weights of terms
    divided: tuple[float, ...] = ()  # by these

    def changed(self, by: float, is_divided: bool = False) -> "Scale":
        """The same after the loss is multiplied, or divided, by a number."""
        weight = None if self.weight is None else self.weight * (1 / by if is_divided else by)
        if is_divided:
            return self._replace(weight=weight, divided=(*self.divided, by))
        return self._replace(weight=weight, multiplied=(*self.multiplied, by))


def scale_of(loss: Any, gradient: Any = None) -> Scale:
    """How the examples are scaled. `gradient` is the argument of `backward`.

    `loss / 4` has 1/4 of a mean, a sum of two means has 2. Means and sums are recognized by torch's own losses, and by
    `mean` and `sum` of these. The numbers by which the whole loss is multiplied and divided are there in any case.
    """
    try:
        found = _scale(loss.grad_fn, _DEEPEST)
        factor = 1.0 if gradient is None else gradient.item()
        if found is not None and factor:
            return found if gradient is None else found.changed(1 / factor, is_divided=True)
        return _outside(loss.grad_fn)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # saved tensors may be gone, or be none
        return Scale(None)


def _outside(node: Any) -> Scale:
    by, below = _by_number(node) if node is not None else (0.0, None)
    found = _outside(below) if below is not None else Scale(None)
    return found.changed(by, _divides(node)) if by else found


def _scale(node: Any, depth: int) -> Scale | None:
    if node is None or not depth:
        return None
    name = type(node).__name__
    below = [each for each, _ in node.next_functions]
    if name in _PASSING:
        return _scale(below[0], depth - 1)
    if name == "MeanBackward0":
        picked = float(node._saved_self_sym_numel) if type(below[0]).__name__ in _PICKING else 0.0
        return _mean(below[0], depth)._replace(examples=picked)
    if name == "SumBackward0":
        return _sum(below[0], depth)
    if (reduction := getattr(node, "_saved_reduction", None)) in (_MEAN, _SUM):
        return Scale(1.0, _examples(node), reduction == _SUM)
    if name == "NegBackward0":
        return _scale(below[0], depth - 1)
    if name in ("AddBackward0", "SubBackward0"):
        return _added([_scale(each, depth - 1) for each in below if each is not None])
    by, rest = _by_number(node)
    found = _scale(rest, depth - 1) if by else None
    return None if found is None else found.changed(by, _divides(node))


def _divides(node: Any) -> bool:
    return type(node).__name__ == "DivBackward0"


def _by_number(node: Any) -> tuple[float, Any]:
    """The number by which a node multiplies or divides, and the node below; 0.0 if it does something else."""
    name, below = type(node).__name__, [each for each, _ in node.next_functions]
    if name in _PASSING:
        return 0.0, below[0]
    if name not in ("DivBackward0", "MulBackward0") or sum(each is not None for each in below) != 1:
        return 0.0, None
    other = node._saved_other if below[0] is not None else node._saved_self
    if (below[0] is None and _divides(node)) or getattr(other, "numel", lambda: 1)() != 1:
        return 0.0, None
    value = float(other)
    return (value if math.isfinite(value) else 0.0), next(each for each in below if each is not None)


def _mean(node: Any, depth: int) -> Scale:
    """The scale of a mean of anything, of stacked means, or of examples that are all scaled by one number."""
    if type(node).__name__ == "StackBackward0":
        found = _added([_scale(each, depth - 1) for each, _ in node.next_functions])
        count = len(node.next_functions)
        return (
            found._replace(weight=found.weight / count) if found and found.weight and not found.is_sum else Scale(1.0)
        )
    by, rest = _by_number(node) if node is not None else (0.0, None)
    return _mean(rest, depth - 1).changed(by, _divides(node)) if by and depth else Scale(1.0)


def _sum(node: Any, depth: int) -> Scale | None:
    """The scale of a sum of torch's losses by example, or of stacked means; None for anything else."""
    if type(node).__name__ == "StackBackward0":
        return _added([_scale(each, depth - 1) for each, _ in node.next_functions])
    if getattr(node, "_saved_reduction", None) == _NONE:
        return Scale(1.0, _examples(node), is_sum=True)
    by, rest = _by_number(node) if node is not None else (0.0, None)
    found = _sum(rest, depth - 1) if rest is not None and depth else None
    return found.changed(by, _divides(node)) if found and by else found


def _examples(node: Any) -> float:
    """The number of examples of one of torch's losses that it does not ignore; 0 if classes have weights."""
    if getattr(node, "_saved_weight", None) is not None:
        return 0.0
    target, ignored = node._saved_target, getattr(node, "_saved_ignore_index", None)
    if ignored is None:
        return float(target.numel())
    return float((target != (ignored - 2**64 if ignored >= 2**63 else ignored)).sum())  # torch leaves out its sign


def _added(terms: Sequence[Scale | None]) -> Scale | None:
    """The scale of a sum of terms that are all means, or all sums over as many examples."""
    known = [each for each in terms if each is not None]
    if not known or None in terms or any(each.is_sum != known[0].is_sum for each in known):
        return None
    are_alike = all(each.examples == known[0].examples for each in known)
    if known[0].is_sum and not are_alike:
        return None
    multiplied = tuple(number for each in known for number in each.multiplied)
    divided = tuple(number for each in known for number in each.divided)
    weight = sum(each.weight or 0.0 for each in known)
    return Scale(weight, known[0].examples if are_alike else 0.0, known[0].is_sum, multiplied, divided)
