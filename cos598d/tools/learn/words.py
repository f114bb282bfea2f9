"""Wrong gradients in a student's words: what they are instead of the mean, with a number expected and one found."""

from collections import Counter
from collections.abc import Mapping, Sequence

from cos598d.tools.check.claims.base import World
from cos598d.tools.check.comparison import Comparison, difference
from cos598d.tools.check.diagnosis import Symptom, sentence

# By kind of symptom; the others have the words of `cos598d check`. `sum`: the mean times n.
PLAIN = {
    "sum": "rank {rank}'s gradient is the sum over {n} ranks, not their average: divide by n, the number of ranks",
    "twice": "rank {rank}'s gradient is the average divided by n a second time, so off by 1/{n}: divide only once",
    "local": "rank {rank} keeps its own gradient, not the average: put your result into the gradient itself (in place, "
    "with gradient.copy_(...) or gradient /= n); a new tensor with the same name changes nothing outside",
    "not sent back": "only rank {right:.0f} has the average, and rank {rank} still has its own gradient: the gradients "
    "were gathered or reduced there, and the average was not sent back",
    "broadcast": "rank {rank} has a copy of one rank's own gradient, not the average: it was sent, but not added up",
    "divided alone": "rank {rank} has its own gradient times {factor:.4g}: it was divided, but never added to the "
    "others'",
    "zero": "rank {rank}'s gradient is zero instead of the average",
    "stale": "rank {rank} has the average of the step before: each step must average its own gradients",
}


def in_words(worlds: Sequence[World], own: Mapping[str, str]) -> tuple[int, str, str]:
    """Of worlds with wrong gradients: a rank, what is wrong there in a sentence, and what was expected and got.

    `own` are a lesson's words by kind of symptom.
    """
    found = [(world.symptom, world) for world in worlds if world.symptom]
    kind = Counter(symptom.kind for symptom, _ in found).most_common(1)[0][0]
    first, world = next(pair for pair in found if pair[0].kind == kind)
    alike = [symptom for symptom, _ in found if symptom.kind == kind]
    rank, name, comparison = _worst(world.comparisons)
    numbers = {**first.numbers, "n": first.world_size, "rank": rank, "name": name}
    words = ({**PLAIN, **own}).get(_plain_kind(alike))
    told = sentence(alike)
    where = f" ({first.where})" if first.where else ""
    said = words.format(**numbers) + where if words else f"rank {rank}'s gradients are wrong: {told}"
    return rank, said, _numbers_of(comparison, rank, name)


def _plain_kind(symptoms: Sequence[Symptom]) -> str:
    """The kind of these symptoms; of a wrong factor, whether it is n or 1/n on any number of ranks."""
    if symptoms[0].kind != "scaled":
        return symptoms[0].kind
    factors = {symptom.world_size: symptom.numbers["factor"] for symptom in symptoms}
    for kind, power in (("sum", 1), ("twice", -1)):
        if all(abs(factor / n**power - 1) < 1e-3 for n, factor in factors.items()):
            return kind
    return "scaled"


def _worst(comparisons: Sequence[Comparison]) -> tuple[int, str, Comparison]:
    """A rank and the tensor that is furthest off there, in the first comparison that is wrong; the last such rank."""
    comparison = next(each for each in comparisons if any(each.wrong))
    rank = max(rank for rank, names in enumerate(comparison.wrong) if names)
    found, right = comparison.found[rank], comparison.right
    return rank, max(comparison.wrong[rank], key=lambda name: difference(found[name], right[name])), comparison


def _numbers_of(comparison: Comparison, rank: int, name: str) -> str:
    found, right = comparison.found[rank][name], comparison.right[name]
    n = len(comparison.found)
    if found is None or right is None:
        has, should = ("no gradient" if each is None else "a gradient" for each in (found, right))
        return f"expected {should} of {name} on rank {rank} of {n}, got {has}"
    off = (found - right).abs().flatten().nan_to_num(float("inf"))
    place = int(off.argmax())
    expected, got = (tensor.flatten()[place].item() for tensor in (right, found))
    moment = f", in step {comparison.step + 1}" if comparison.step else ""
    return f"expected {expected:.6g}, got {got:.6g} in element {place} of {name} on rank {rank} of {n}{moment}"
