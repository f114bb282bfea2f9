"""What was applied to one tensor, as a combination of what the ranks computed: the factors identify the fault.

The applied gradient G of a rank is fitted by the local gradients g[j, m] of ranks j and micro-batches m, from their
sketches. The simplest combination that leaves next to nothing is taken. In order: the mean over all ranks; this rank's
own; a factor per rank; a factor per micro-batch; a factor per rank and micro-batch. The first two are also tried
together with the gradient from before the first backward pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cos598d.tools.audit.sketch import SIZE

MEAN, OWN, BY_RANK, BY_MICRO, STALE, OWN_STALE = "mean", "own", "by rank", "by micro-batch", "stale", "own and stale"
BY_BOTH, PARTLY_OWN = "by rank and micro-batch", "mean of some micro-batches, own of others"
NOTHING, SMALL, INDISTINCT, UNKNOWN = "nothing", "small", "indistinct", "unknown"
NEAR = 0.02  # factors so near to one another are the same
_FEW = 20  # unknown factors that 32 sums can tell
_SMALL = 1e-7  # of the largest tensor's gradient: what is smaller is rounding
_CANCELLED = 1e-3  # of the tolerance: where the ranks' gradients add up to less of one of them, the sum is rounding
_LEAST_APART = 1e-2  # local gradients that differ by less cannot be told apart


@dataclass(frozen=True)
class Fit:
    """What one rank applied to one tensor in one step.

    `factor` is G over the mean (MEAN), or over this rank's own gradient (OWN); `factors` are by rank or micro-batch,
    as multiples of what the mean would give each.
    """

    kind: str
    factor: float = 0.0
    factors: tuple[float, ...] = ()
    residual: float = 0.0
    lost: tuple[int, ...] = ()  # of PARTLY_OWN the micro-batches that are the rank's own


def fit(
    applied: np.ndarray,
    local: np.ndarray,
    before: np.ndarray | None,
    rank: int,
    tolerance: float,
    largest: float,
    elements: int = SIZE,
) -> Fit:
    """The simplest combination for G = `applied` (SIZE,) of `local` (ranks, micro-batches, SIZE).

    `rank` is this rank's index in `local`. `before` is the gradient from before the first backward pass. `largest` is
    the norm of the largest tensor's local gradient in this step. A tensor of few `elements` determines fewer factors
    than it has elements.
    """
    ranks, micros, _ = local.shape
    by_rank = local.sum(1)
    mean, own = by_rank.mean(0), by_rank[rank]
    size, of_applied = np.linalg.norm(by_rank, axis=1).max(), np.linalg.norm(applied)
    if max(size, of_applied) <= _SMALL * largest:
        return Fit(SMALL)
    if 0 < max(np.linalg.norm(mean), of_applied) <= _CANCELLED * tolerance * size:
        return Fit(SMALL)  # as of a bias before a batch norm over all ranks
    if not of_applied:
        return Fit(NOTHING)

    def solve(*columns: np.ndarray) -> tuple[np.ndarray, float]:
        matrix = np.stack(columns, axis=1)
        found, *_ = np.linalg.lstsq(matrix, applied, rcond=None)
        return found, float(np.linalg.norm(matrix @ found - applied) / np.linalg.norm(applied))

    (factor,), of_mean = solve(mean)
    (alone,), of_own = solve(own)
    if of_mean <= tolerance:
        is_alike = ranks > 1 and of_own <= tolerance
        return Fit(INDISTINCT if is_alike else MEAN, float(factor), residual=of_mean)
    if of_own <= tolerance:
        return Fit(OWN, float(alone), residual=of_own)
    for other in (place for place in range(ranks) if place != rank):
        (factor,), residual = solve(by_rank[other])
        if residual <= tolerance and not _is_multiple(by_rank[other], own, tolerance):
            factors = [0.0] * ranks
            factors[other] = float(factor) * ranks
            return Fit(BY_RANK, float(factor), tuple(factors), residual)
    few = min(_FEW, elements - 1)
    if few > 1 and before is not None and np.linalg.norm(before):
        for kind, column in ((STALE, mean), (OWN_STALE, own)):
            (of_new, of_old), residual = solve(column, before)
            if residual <= tolerance and abs(of_old) > 10 * tolerance:
                return Fit(kind, float(of_new), (float(of_old),), residual)
    if 1 < micros <= few and _are_apart(local.mean(0)):
        found, residual = solve(*local.mean(0))
        if residual <= tolerance:
            return Fit(BY_MICRO, float(np.median(found)), tuple(map(float, found)), residual)
    if 1 < ranks <= few and _are_apart(by_rank):
        found, residual = solve(*by_rank)
        if residual <= tolerance:
            return Fit(BY_RANK, float(found.mean() * ranks), tuple(map(float, found * ranks)), residual)
    if micros > 1 and ranks * micros <= min(_FEW + 4, elements - 1):
        flat = local.reshape(ranks * micros, -1)
        found, residual = solve(*flat)
        if residual <= tolerance and _are_apart(flat):
            table = found.reshape(ranks, micros) * ranks
            if (np.abs(table).max(0) <= 10 * tolerance).any():
                return Fit(BY_MICRO, float(table.mean()), tuple(map(float, table.mean(0))), residual)
            others = np.abs(np.delete(table, rank, 0)).max(0) if ranks > 1 else np.ones(micros)
            is_own = (others <= NEAR) & (np.abs(table[rank]) > NEAR)
            is_mean = np.ptp(table, 0) <= NEAR * np.abs(table).max(0)
            if is_own.any() and (is_own | is_mean).all():
                lost = tuple(int(m) for m in np.flatnonzero(is_own))
                return Fit(PARTLY_OWN, float(table.mean()), residual=residual, lost=lost)
            return Fit(BY_BOTH, float(table.mean()), tuple(map(float, table.mean(1))), residual)
    return Fit(UNKNOWN, residual=of_mean)


def fit_ones(
    ones: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray | None]],
    others: Sequence[Fit],
    rank: int,
    tolerance: float,
    largest: float,
) -> dict[str, Fit]:
    """The fits of tensors of one element, by name; (applied, local, before) of each.

    Any number is a multiple of any other. So they are fitted together, as one tensor. If that fails, each is fitted by
    the factor of the `others` on this rank.
    """
    if not ones:
        return {}
    applied, local, before = zip(*ones.values(), strict=True)
    was_there = [np.zeros(SIZE) if each is None else each for each in before]
    together = fit(
        np.concatenate(applied),
        np.concatenate(local, axis=2),
        np.concatenate(was_there),
        rank,
        tolerance,
        largest,
        len(ones),
    )
    if len(ones) > 1 and together.kind != UNKNOWN:
        return dict.fromkeys(ones, together)
    known = [each.factor for each in others if each.kind in (MEAN, OWN)]
    return {name: _one(each[0], each[1], rank, tolerance, known, largest) for name, each in ones.items()}


def _one(
    applied: np.ndarray, local: np.ndarray, rank: int, tolerance: float, known: Sequence[float], largest: float
) -> Fit:
    """The fit of one tensor of one element. `known` are the other tensors' factors, one of which it should have too."""
    by_rank = local.sum(1)
    ranks, mean, own = len(by_rank), by_rank.mean(0), by_rank[rank]
    if max(np.linalg.norm(by_rank, axis=1).max(), np.linalg.norm(applied)) <= _SMALL * largest:
        return Fit(SMALL)
    if not np.linalg.norm(applied):
        return Fit(NOTHING)
    usual = float(np.median(known)) if known else 1.0

    def factor_of(column: np.ndarray) -> float | None:
        for factor in (usual, usual * ranks, usual / ranks, 1.0):
            if np.linalg.norm(factor * column - applied) <= tolerance * np.linalg.norm(applied):
                return factor
        return None

    of_mean, of_own = factor_of(mean), factor_of(own)
    if of_mean is not None and (of_own is not None or np.linalg.norm(own - mean) <= tolerance * np.linalg.norm(mean)):
        return Fit(INDISTINCT, of_mean)
    if of_mean is not None:
        return Fit(MEAN, of_mean)
    if of_own is not None:
        return Fit(OWN, of_own)
    for other, column in enumerate(by_rank):
        if (factor := factor_of(column)) is not None:
            return Fit(BY_RANK, factor, tuple(factor * ranks * (place == other) for place in range(ranks)))
    return Fit(UNKNOWN)


def _is_multiple(one: np.ndarray, other: np.ndarray, tolerance: float) -> bool:
    size = float(one @ one)
    return size == 0 or bool(
        np.linalg.norm(other - one * float(other @ one) / size) <= tolerance * np.linalg.norm(other)
    )


def _are_apart(rows: np.ndarray) -> bool:
    """Whether the rows differ enough to determine the factor of each."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    kept = rows[norms[:, 0] > 0] / norms[norms[:, 0] > 0]
    return len(kept) > 0 and float(np.linalg.svd(kept, compute_uv=False).min()) > _LEAST_APART
