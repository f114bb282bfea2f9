"""How a run resumes: from which checkpoint of its folder, and whether it is the same run."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from cos598d.checkpoints.folder import Found, Training, newest, steps
from cos598d.comm.group import Ranks
from cos598d.config import RunConfig
from cos598d.data.examples import Examples
from cos598d.errors import UsageError
from cos598d.measure.monitor import Monitor
from cos598d.measure.record import RunRecord
from cos598d.measure.tensorboard import Board
from cos598d.models.build import ModelSource
from cos598d.models.configs import plain_config
from cos598d.plan import Plan
from cos598d.records.conventions import CHECKPOINTS, ITERATIONS, SETTING, SUMMARY
from cos598d.terminal.console import Console
from cos598d.terminal.printable import printable

# If one of these flags changes, it is another run. The sync, the ranks and the times of saving may change.
SAME_FLAGS = (
    *("task_name", "max_seq_length", "max_train_examples", "augment", "dropout", "precision", "seed", "optimizer"),
    *("learning_rate", "lr_scheduler", "warmup_steps", "weight_decay", "adam_epsilon", "momentum", "max_grad_norm"),
)


def is_ours(folder: Path, config: RunConfig) -> bool:
    """Whether `folder`, which is not empty, has an earlier attempt of this run, which is to be resumed."""
    # Another host than rank 0's has rows only.
    names = (CHECKPOINTS, SETTING, SUMMARY, ITERATIONS.format(rank="*"))
    return config.resume is not None and any(place for name in names for place in folder.glob(name))


def say_if_finished(folder: Path, config: RunConfig, ranks: Ranks, console: Console) -> bool:
    """Whether the run to resume has ended well, the same on every rank. If so, print that."""
    has_model = not (config.do_train and config.save_model) or (folder / "model").is_dir()
    goes_on = config.resume_anyway and steps(folder / CHECKPOINTS)
    is_finished = has_model and (folder / SUMMARY).is_file() and not goes_on
    if config.resume is None or not ranks.exchange(is_finished)[0]:
        return False
    console.say(
        f"the run in {folder} is finished, so nothing is left to train. To go on from its last checkpoint, if it has "
        "one, with other flags, add --resume_anyway."
    )
    return True


def find_checkpoint(
    folder: Path, config: RunConfig, facts: Mapping[str, Any], ranks: Ranks, console: Console
) -> Found | None:
    """The newest checkpoint that can be read; None without --resume, or if there is none. The same on every rank.

    Raises UsageError if all are damaged, or if it is another run's by its `facts`.
    """
    if config.resume is None:
        return None
    found, remarks = newest(folder / CHECKPOINTS) if ranks.rank == 0 else (None, [])
    if remarks and found is None:
        raise UsageError(f"no usable checkpoint is left. {remarks[0]} Start over with --overwrite_output_dir.")
    for remark in remarks:
        console.say(f"{remark} The one before it counts.")
    told = ranks.exchange(found and [str(found.path), msgspec.to_builtins(found.training)])[0]
    if told is None:
        console.say(f"there is no checkpoint in {folder}: training starts from scratch")
        return None
    found = found or Found(Path(told[0]), msgspec.convert(told[1], Training))
    before = found.training.facts
    changes = "; ".join(
        f"{name} was {printable(before.get(name), 100)} and is {now}"
        for name, now in facts.items()
        if before.get(name) != now
    )
    if changes and not config.resume_anyway:
        raise UsageError(
            f"this differs from the run that was saved as {found.path}: {changes}. Use the same flags as then, or add "
            "--resume_anyway."
        )
    if changes:
        console.say(f"this differs from the saved run, and resumes anyway: {changes}")
    return found


def open_record(
    folder: Path, config: RunConfig, ranks: Ranks, found: Found | None, monitor: Monitor | None, board: Board | None
) -> RunRecord:
    """The run's record, one over all attempts: it continues from `found`, or begins.

    If a run starts over in a folder that is overwritten, an earlier run's checkpoints are removed at once: they could
    be mistaken for this one's.
    """
    if found is None and ranks.rank == 0 and config.do_train and (folder / CHECKPOINTS).exists():
        shutil.rmtree(folder / CHECKPOINTS)
    ranks.exchange("an earlier run's checkpoints are removed")
    resume_at = found.training.position.iteration if found else None
    return RunRecord(folder, ranks.rank, monitor, board, world_size=ranks.world_size, resume_at=resume_at)


def facts_of(
    config: RunConfig, plan: Plan, examples: Examples, evaluated: Mapping[str, Examples], source: ModelSource
) -> dict[str, Any]:
    """What must be equal in every attempt of a run, as JSON values under the names that sentences give them."""
    form = json.dumps(plain_config(source.config), sort_keys=True).encode()
    return {f"--{name}": getattr(config, name) for name in SAME_FLAGS} | {
        "--total_train_batch_size": plan.batch_size,
        "--num_train_epochs or --max_steps, in steps,": plan.steps,
        "--model_name_or_path": source.description,
        "the model's configuration": hashlib.sha256(form).hexdigest(),
        "the training data": [len(examples), examples.digest()],
        "the evaluation data": {part: [len(one), one.digest()] for part, one in evaluated.items()},
    }
