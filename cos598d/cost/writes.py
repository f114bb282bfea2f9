"""What a run would write to the disk, and roughly how much."""

from collections.abc import Sequence
from pathlib import Path

from cos598d.checkpoints import FOLDER
from cos598d.checkpoints.resume import named_folder
from cos598d.config import RunConfig, folder_name
from cos598d.cost.planned import PlannedSteps, Work
from cos598d.measure.thinning import ALL, AUTO, MOST_CALLS, MOST_ROWS, LedgerRule
from cos598d.plan import epochs_between_checkpoints
from cos598d.strategies.formula import TrainingSpec
from cos598d.strategies.optimizers import counter_bytes, states_per_weight

# Bytes of a row, as in rows of real runs: of an iteration, of a call, and of a sample per second.
ITERATION_BYTES, CALL_BYTES, SAMPLE_BYTES = 1100, 330, 500
FILES_BYTES = 20_000  # config, environment and summary, without its losses
LOSS_BYTES = 22
TENSOR_BYTES = 300  # bytes that a weights file has per tensor in addition to its values


def writes(
    config: RunConfig, work: Work, steps: PlannedSteps, calls: int, seconds: float | None
) -> list[tuple[Path, int]]:
    """Path and bytes of the record, of the model and of the checkpoints (at their largest).

    calls: one rank's per step. seconds: of the whole run, if known, for the samples of the network.
    """
    folder = named_folder(config) or folder_name(config, steps.ranks, "WHEN")
    tensors = len(list(work.model.named_parameters()))
    job = TrainingSpec(work.model, steps.ranks, 0, states_per_weight(config), counter_bytes(config))
    weights = job.weights + job.frozen + TENSOR_BYTES * tensors
    state = job.state(job.weights, len(job.trainable)) + TENSOR_BYTES * job.states * len(job.trainable)
    found = [(folder, _record(config, steps, calls, seconds))]
    if config.save_model:
        found.append((folder / "model", weights))
    kept = checkpoints_kept(config, steps)
    if kept:
        found.append((folder / FOLDER, kept * (weights + state)))
    return found


def checkpoints_kept(config: RunConfig, steps: PlannedSteps) -> int:
    """How many checkpoints are on the disk at the end, at most: the newest ones, and the best one in addition."""
    if not steps.plan.has_checkpoints:
        return 0
    epochs = steps.plan.epoch_of(steps.plan.steps)
    made = steps.plan.steps // config.save_steps if config.save_steps else 0
    made += epochs // between if (between := epochs_between_checkpoints(config)) else 0
    if config.save_seconds is not None:
        made += config.keep
    return min(made, config.keep) + int(config.do_eval)


def _record(config: RunConfig, steps: PlannedSteps, calls: int, seconds: float | None) -> int:
    iterations, ranks = steps.plan.steps, steps.ranks
    rule = LedgerRule.parse(config.ledger)
    all_rows = iterations * ranks
    of_iterations = all_rows if rule.name == ALL else iterations + min(iterations * (ranks - 1), MOST_ROWS)
    of_calls = _kept(rule, iterations) * ranks * calls
    if rule.name == AUTO:
        of_calls = min(all_rows * calls, MOST_CALLS)
    samples = ranks * seconds / config.monitor_interval if seconds and config.monitor_interval else 0
    rows: Sequence[float] = (of_iterations * ITERATION_BYTES, of_calls * CALL_BYTES, samples * SAMPLE_BYTES)
    return round(FILES_BYTES + iterations * LOSS_BYTES + sum(rows))


def _kept(rule: LedgerRule, iterations: int) -> int:
    """The number of iterations whose calls have rows, for a rule that depends only on their numbers."""
    return sum(rule.keeps(iteration) for iteration in range(1, iterations + 1))
