"""What was applied to one tensor, as a combination of what the ranks computed: the factors name the fault.

The applied gradient G of a rank is fitted by the local gradients g[j, m] of ranks j and micro-batches m, from their
sketches. The plainest combination that leaves next to nothing is taken: the mean over all ranks; this rank's own; a
factor for each rank; a factor for each micro-batch; a factor for each of both; the first two with the gradient that was
there before the first backward pass.
"""

from dataclasses import dataclass

import numpy as np

MEAN, OWN, BY_RANK, BY_MICRO, STALE, OWN_STALE = "mean", "own", "by rank", "by micro-batch", "stale", "own and stale"
BY_BOTH, PARTLY_OWN = "by rank and micro-batch", "mean of some micro-batches, own of others"
NOTHING, SMALL, INDISTINCT, UNKNOWN = "nothing", "small", "indistinct", "unknown"
NEAR = 0.02  # factors so near to one another are the same
_FEW = 20  # unknown factors that 32 sums can tell
_SMALL = 1e-7  # of the largest tensor's gradient: what is smaller is rounding
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
    lost: tuple[int, ...] = ()  # micro-batches of an own gradient that are not in it; of PARTLY_OWN those that are own

    @property
    def is_lost(self) -> bool:
        """Whether micro-batches of an own gradient are not in it."""
        return self.kind == OWN and bool(self.lost)


def fit(
    applied: np.ndarray, local: np.ndarray, before: np.ndarray | None, rank: int, tolerance: float, largest: float
) -> Fit:
    """The plainest combination for G = `applied` (SIZE,) of `local` (ranks, micro-batches, SIZE).

    `rank` is this rank's place among them, `before` the gradient that was there before; `largest` the norm of the
    largest tensor's local gradient in this step.
    """
    ranks, micros, _ = local.shape
    by_rank = local.sum(1)
    mean, own = by_rank.mean(0), by_rank[rank]
    if max(np.linalg.norm(by_rank, axis=1).max(), np.linalg.norm(applied)) <= _SMALL * largest:
        return Fit(SMALL)
    if not np.linalg.norm(applied):
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
    if before is not None and np.linalg.norm(before):
        for kind, column in ((STALE, mean), (OWN_STALE, own)):
            (of_new, of_old), residual = solve(column, before)
            if residual <= tolerance and abs(of_old) > 10 * tolerance:
                return Fit(kind, float(of_new), (float(of_old),), residual)
    if 1 < micros <= _FEW and _are_apart(local.mean(0)):
        found, residual = solve(*local.mean(0))
        if residual <= tolerance:
            return Fit(BY_MICRO, float(np.median(found)), tuple(map(float, found)), residual)
        found, residual = solve(*local[rank])
        if residual <= tolerance:
            lost = tuple(int(m) for m in np.flatnonzero(np.abs(found) <= 10 * tolerance))
            return Fit(OWN, float(np.abs(found).max()), residual=residual, lost=lost)
    if 1 < ranks <= _FEW and _are_apart(by_rank):
        found, residual = solve(*by_rank)
        if residual <= tolerance:
            return Fit(BY_RANK, float(found.mean() * ranks), tuple(map(float, found * ranks)), residual)
    if micros > 1 and ranks * micros <= _FEW + 4:
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


def _are_apart(rows: np.ndarray) -> bool:
    """Whether the rows are different enough for the factor of each to be found."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    kept = rows[norms[:, 0] > 0] / norms[norms[:, 0] > 0]
    return len(kept) > 0 and float(np.linalg.svd(kept, compute_uv=False).min()) > _LEAST_APART
