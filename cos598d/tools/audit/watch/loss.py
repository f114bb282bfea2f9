"""The weight of a micro-batch's examples in the tensor on which `backward` is called, from its graph."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

# What torch's losses do with the examples (torch's Reduction).
_NONE, _MEAN, _SUM = 0, 1, 2
_PASSING = ("ToCopyBackward0", "ViewBackward0", "UnsafeViewBackward0", "SqueezeBackward0", "SqueezeBackward1")
_NORMS = ("LinalgVectorNormBackward0", "NormBackward0", "NormBackward1")
_PICKING = ("IndexBackward0", "MaskedSelectBackward0")
_DEEPEST = 200  # a sum of many terms is as deep as it is long


class Scale(NamedTuple):
    """The loss is `weight` times a mean over examples; with `counts`, `weight` times a sum over so many examples.

    There is one count for each way of counting: with padding and without it.
    """

    weight: float
    counts: tuple[float, ...] = ()
    multiplied: tuple[float, ...] = ()  # by these numbers on the way: weights of terms
    divided: tuple[float, ...] = ()  # by these
    kept: float = 0.0  # a mean over so many examples, without those that it ignores; 0 if that is not known

    def times(self, factor: float) -> "Scale":
        """The same with another weight."""
        return self._replace(weight=self.weight * factor)


def scale_of(loss: Any, gradient: Any = None) -> Scale | None:
    """How the examples are scaled; None if the graph does not show it. `gradient` is the argument of `backward`.

    `loss / 4` has 1/4 of a mean, a sum of two means has 2. A term of weights only, such as a manual weight decay, has
    none. Means and sums are recognized by torch's own losses, and by `mean` and `sum` of these.
    """
    try:
        scale = _scale(loss.grad_fn, _DEEPEST)
        if gradient is None or scale is None:
            return scale
        factor = gradient.item() if loss.numel() == 1 else 0.0
        return scale.times(factor)._replace(divided=(*scale.divided, 1 / factor)) if factor else None
    except (AttributeError, RuntimeError, TypeError, ValueError):  # saved tensors may be gone, or be none
        return None


def factors_of(loss: Any) -> tuple[list[float], list[float]]:
    """The numbers by which the whole loss is multiplied and divided, even if its scale is not known."""
    multiplied: list[float] = []
    divided: list[float] = []
    node = getattr(loss, "grad_fn", None)
    while node is not None and type(node).__name__ in ("DivBackward0", "MulBackward0", *_PASSING):
        by, below = _by_number(node)
        if by:
            (divided if type(node).__name__ == "DivBackward0" else multiplied).append(by)
        node = below
    return multiplied, divided


def _scale(node: Any, depth: int) -> Scale | None:
    if node is None or not depth:
        return None
    name = type(node).__name__
    below = [each for each, _ in node.next_functions]
    if name in _PASSING:
        return _scale(below[0], depth - 1)
    if _is_of_weights(node):
        return Scale(0.0)
    if name == "MeanBackward0":
        kept = float(node._saved_self_sym_numel) if type(below[0]).__name__ in _PICKING else 0.0
        return _mean(below[0], depth)._replace(kept=kept)
    if name == "SumBackward0":
        return _sum(below[0], depth)
    if (reduction := getattr(node, "_saved_reduction", None)) in (_MEAN, _SUM):
        return Scale(1.0, kept=_kept(node)) if reduction == _MEAN else Scale(1.0, _counts(node))
    if name == "NegBackward0":
        return _scale(below[0], depth - 1)
    if name in ("AddBackward0", "SubBackward0"):
        return _added([_scale(each, depth - 1) for each in below if each is not None])
    by, rest = _by_number(node)
    found = _scale(rest, depth - 1) if by else None
    return None if found is None else _changed(found, name, by)


def _by_number(node: Any) -> tuple[float, Any]:
    """The number by which a node multiplies or divides, and the node below; 0.0 if it does something else."""
    name, below = type(node).__name__, [each for each, _ in node.next_functions]
    if name in _PASSING:
        return 0.0, below[0]
    if name not in ("DivBackward0", "MulBackward0") or sum(each is not None for each in below) != 1:
        return 0.0, None
    other = node._saved_other if below[0] is not None else node._saved_self
    if (below[0] is None and name == "DivBackward0") or getattr(other, "numel", lambda: 1)() != 1:
        return 0.0, None
    value = float(other)
    return (value if math.isfinite(value) else 0.0), next(each for each in below if each is not None)


def _changed(found: Scale, name: str, by: float) -> Scale:
    if name == "DivBackward0":
        return found.times(1 / by)._replace(divided=(*found.divided, by))
    return found.times(by)._replace(multiplied=(*found.multiplied, by))


def _mean(node: Any, depth: int) -> Scale:
    """The scale of a mean of anything, of stacked means, or of examples that are all scaled by one number."""
    name = type(node).__name__
    if name == "StackBackward0":
        found = _added([_scale(each, depth - 1) for each, _ in node.next_functions])
        return found.times(1 / len(node.next_functions)) if found and not found.counts else Scale(1.0)
    by, rest = _by_number(node) if node is not None else (0.0, None)
    return _changed(_mean(rest, depth - 1), name, by) if by and depth else Scale(1.0)


def _sum(node: Any, depth: int) -> Scale | None:
    """The scale of a sum of torch's losses by example, or of stacked means; None for anything else."""
    name = type(node).__name__
    if name == "StackBackward0":
        return _added([_scale(each, depth - 1) for each, _ in node.next_functions])
    if getattr(node, "_saved_reduction", None) == _NONE:
        return Scale(1.0, _counts(node))
    by, rest = _by_number(node) if node is not None else (0.0, None)
    found = _sum(rest, depth - 1) if (by or name in _PASSING) and rest is not None and depth else None
    return found if found is None or not by else _changed(found, name, by)


def _kept(node: Any) -> float:
    """The number of examples in a mean that may ignore some; 0 if it ignores none, or if classes have weights."""
    if getattr(node, "_saved_ignore_index", None) is None or getattr(node, "_saved_weight", None) is not None:
        return 0.0
    return _counts(node)[0]


def _counts(node: Any) -> tuple[float, ...]:
    """The number of examples of one of torch's losses: those that it does not ignore, and all."""
    target = node._saved_target
    if (ignored := getattr(node, "_saved_ignore_index", None)) is None:
        return (float(target.numel()),)
    ignored = ignored - 2**64 if ignored >= 2**63 else ignored  # torch gives it without its sign
    return float((target != ignored).sum()), float(target.numel())


def _added(terms: Sequence[Scale | None]) -> Scale | None:
    """The scale of a sum of terms that are all means, or all sums over the same examples."""
    known = [each for each in terms if each is not None]
    known = [each for each in known if each.weight] or known[:1]
    if not known or None in terms or any(each.counts != known[0].counts for each in known):
        return None
    multiplied = tuple(number for each in known for number in each.multiplied)
    divided = tuple(number for each in known for number in each.divided)
    kept = known[0].kept if all(each.kept == known[0].kept for each in known) else 0.0
    return Scale(sum(each.weight for each in known), known[0].counts, multiplied, divided, kept)


def _is_of_weights(node: Any) -> bool:
    """Whether it is a sum, a mean or a norm of one leaf's own values."""
    name = type(node).__name__
    if name == "PowBackward0":  # of a norm
        below = node.next_functions[0][0]
        return type(below).__name__ in _NORMS and _is_of_weights(below)
    if name not in (*_NORMS, "SumBackward0", "MeanBackward0"):
        return False
    node = node.next_functions[0][0]
    while type(node).__name__ in ("PowBackward0", "AbsBackward0", "MulBackward0"):
        below = [each for each, _ in node.next_functions]
        if any(each is not below[0] for each in below):
            return False
        node = below[0]
    return type(node).__name__ == "AccumulateGrad"
