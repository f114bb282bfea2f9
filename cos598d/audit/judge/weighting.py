"""Faults of weighting: samples of one global batch that count unequally, and micro-batches that do not count at all."""

from collections.abc import Sequence

from cos598d.audit.book import Book
from cos598d.audit.judge.averaging import median_factors, near
from cos598d.audit.judge.fit import BY_MICRO, MEAN, NEAR, Fit
from cos598d.audit.judge.gradients import Fits, most_common
from cos598d.audit.judge.verdict import Finding, Where, where


def judge_weighting(books: Sequence[Book], fits: Fits) -> list[Finding]:
    """The faults of one group of ranks."""
    if len(books) < 2 or not fits.steps:
        return []
    known = [each for step in fits.steps for of_rank in step.fits for each in of_rank.values()]
    return _micro_batches(fits, known) + _weights(fits)


def _micro_batches(fits: Fits, known: Sequence[Fit]) -> list[Finding]:
    lost = [each for each in known if (each.kind == BY_MICRO and min(map(abs, each.factors)) <= NEAR) or each.lost]
    uneven = [each for each in known if each.kind == BY_MICRO and min(map(abs, each.factors)) > NEAR]
    micros = fits.steps[0].rows[0]["micro"]
    place: Where = where(micros[0]) if micros else ("", 0, "")
    if len(lost) * 2 > len([each for each in known if each.kind not in ("small", "unknown")]):
        number = len(lost[0].lost) or sum(abs(factor) <= NEAR for factor in lost[0].factors)
        says = f"Of {len(micros)} backward passes of a step the gradients of {number} are not in what is applied."
        return [Finding("lost_micro_batches", (says,), place)]
    if len(uneven) * 2 > len(known):
        factors = ", ".join(f"{factor:.3f}" for factor in median_factors(uneven))
        return [Finding("unequal_micro_batches", (f"Their factors in what is applied: {factors}.",), place)]
    return []


def _weights(fits: Fits) -> list[Finding]:
    """Losses that are means of batches of different sizes and count alike, or of equal sizes and do not."""
    for step in fits.steps:
        if most_common(step.known()) != MEAN:
            continue
        micros = [row["micro"] for row in step.rows]
        if any(micro["weight"] is None or not micro["size"] for of_rank in micros for micro in of_rank):
            continue
        of_ranks = [sum(micro["weight"] for micro in each) / sum(micro["size"] for micro in each) for each in micros]
        if max(of_ranks) - min(of_ranks) > NEAR * abs(max(of_ranks, key=abs)):
            sizes = ", ".join(str(sum(micro["size"] for micro in each)) for each in micros)
            says = f"Step {step.iteration}: the ranks have {sizes} samples, and a sample of theirs counts "
            says += f"{', '.join(f'{each / of_ranks[0]:.3f}' for each in of_ranks)} times one of rank 0."
            return [Finding("unequal_weights", (says,), where(micros[0][0]))]
        of_micros = [micro["weight"] for micro in micros[0]]
        if len({micro["size"] for micro in micros[0]}) == 1 and not all(near(each, of_micros[0]) for each in of_micros):
            says = f"Step {step.iteration}: losses of micro-batches of one size are weighted by "
            says += f"{', '.join(f'{each:.3g}' for each in of_micros)}."
            return [Finding("unequal_micro_batches", (says,), where(micros[0][0]))]
    return []
