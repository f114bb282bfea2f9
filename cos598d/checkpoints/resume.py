"""How a run resumes: in which folder, from which checkpoint, and whether it is the same run."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from cos598d.checkpoints.folder import FOLDER, TRAINING, Found, Training, newest, read, remove_all, steps
from cos598d.comm.group import Ranks
from cos598d.config import RunConfig
from cos598d.data.examples import Examples
from cos598d.errors import UsageError
from cos598d.measure.claim import was_left
from cos598d.measure.monitor import Monitor
from cos598d.measure.record import RunRecord
from cos598d.measure.tensorboard import Board
from cos598d.models.build import ModelSource
from cos598d.models.configs import plain_config
from cos598d.plan import Plan
from cos598d.records.conventions import ITERATIONS, SUMMARY
from cos598d.terminal.console import Console
from cos598d.terminal.printable import printable

AUTO = "auto"
# If one of these flags changes, it is another run. The sync, the ranks and the times of saving may change.
SAME_FLAGS = (
    *("task_name", "max_seq_length", "max_train_examples", "augment", "dropout", "precision", "seed", "optimizer"),
    *("learning_rate", "lr_scheduler", "warmup_steps", "weight_decay", "adam_epsilon", "momentum", "max_grad_norm"),
)
_EVALUATION = "the evaluation data"


def named_folder(config: RunConfig) -> Path | None:
    """The run's folder, if flags name it: --output_dir, or that of the run whose checkpoint --resume names."""
    return Path(config.output_dir) if config.output_dir is not None else _resumed_folder(config)


def is_ours(folder: Path, config: RunConfig) -> bool:
    """Whether `folder`, which is not empty, belongs to an earlier attempt of this run, on this host."""
    if config.resume is None:
        return False
    resumed = _resumed_folder(config)
    is_named = config.resume == AUTO or (resumed is not None and resumed.resolve() == folder.resolve())
    has_run = bool(steps(folder / FOLDER)) or was_left(folder) or _is_finished(folder, config)
    # Another host than rank 0's has rows and no summary.
    return is_named and (has_run or any(folder.glob(ITERATIONS.format(rank="*"))))


def say_if_finished(folder: Path, config: RunConfig, ranks: Ranks, console: Console) -> bool:
    """Whether the run to resume has ended well, the same on every rank. If so, print that."""
    if config.resume is None or config.resume_anyway or not ranks.exchange(_is_finished(folder, config))[0]:
        return False
    console.say(
        f"the run in {folder} is finished, so nothing is left to train. To go on from its last checkpoint with other "
        "flags, add --resume_anyway."
    )
    return True


def find_checkpoint(
    folder: Path, config: RunConfig, facts: Mapping[str, Any], ranks: Ranks, console: Console
) -> Found | None:
    """The checkpoint that --resume names; None without --resume, or if `auto` finds none. The same on every rank.

    Raises UsageError if the named one cannot be used, if all are damaged, or if it is another run's by its `facts`.
    """
    if config.resume is None:
        return None
    found = _find(config.resume, folder / FOLDER, console) if ranks.rank == 0 else None
    told = ranks.exchange(found and [str(found.path), msgspec.to_builtins(found.training)])[0]
    if told is None:
        if ranks.exchange((folder / SUMMARY).is_file() and not config.overwrite_output_dir)[0]:
            raise UsageError(
                f"there is no checkpoint to resume from in {folder}, which has a finished run. Choose another "
                "folder, or add --overwrite_output_dir."
            )
        console.say(f"there is no checkpoint in {folder}: training starts from scratch")
        return None
    found = found or Found(Path(told[0]), msgspec.convert(told[1], Training))
    before = found.training.facts
    changes = [
        f"{name} was {printable(before.get(name), 100)} and is {now}"
        for name, now in facts.items()
        if before.get(name) != now and (name != _EVALUATION or config.early_stopping)
    ]
    if changes and not config.resume_anyway:
        raise UsageError(
            f"this differs from the run that was saved as {found.path}: {'; '.join(changes)}. Use the same flags as "
            "then, or add --resume_anyway."
        )
    for change in changes:
        console.say(f"this differs from the saved run, and resumes anyway: {change}")
    return found


def open_record(
    folder: Path,
    config: RunConfig,
    ranks: Ranks,
    found: Found | None,
    monitor: Monitor | None = None,
    board: Board | None = None,
) -> RunRecord:
    """The run's record, one over all attempts: it continues from `found`, or begins.

    If a run starts over in a folder that is overwritten, an earlier run's checkpoints are removed at once: they could
    be mistaken for this one's.
    """
    if found is None and ranks.rank == 0 and config.do_train:
        remove_all(folder / FOLDER)
    ranks.exchange("an earlier run's checkpoints are removed")
    return RunRecord(
        folder,
        ranks.rank,
        monitor,
        board,
        world_size=ranks.world_size,
        resume_at=found.training.iteration if found else None,
        resumed_from=found.path.parent.parent if found else None,
    )


def how_to_go_on(folder: Path, config: RunConfig) -> str:
    """What to do to resume a run that was stopped, as a sentence for the user."""
    if config.resume == AUTO:
        return "To go on, run the same command again."
    return f"To go on, run the same command with --resume {AUTO if config.output_dir is not None else folder}."


def facts_of(
    config: RunConfig, plan: Plan, examples: Examples, evaluated: Mapping[str, Examples], source: ModelSource
) -> dict[str, Any]:
    """What must be equal in every attempt of a run, as JSON values under the names that sentences give them.

    `evaluated` counts if it can end the run.
    """
    form = json.dumps(plain_config(source.config), sort_keys=True).encode()
    return {f"--{name}": getattr(config, name) for name in SAME_FLAGS} | {
        "--total_train_batch_size": plan.batch_size,
        "--num_train_epochs or --max_steps, in steps,": plan.steps,
        "--model_name_or_path": source.description,
        "the model's configuration": hashlib.sha256(form).hexdigest(),
        "the training data": [len(examples), examples.digest()],
        _EVALUATION: {part: [len(one), one.digest()] for part, one in evaluated.items()},
    }


def _find(resume: str, folder: Path, console: Console) -> Found | None:
    """The checkpoint that --resume names: the newest in `folder`, or that of a checkpoint's or a run's folder."""
    if resume != AUTO:
        folder = Path(resume).expanduser()
        if (folder / TRAINING).exists():
            return read(folder)
        folder = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    found, remarks = newest(folder)
    if found is None and remarks:
        raise UsageError(f"no usable checkpoint is left. {remarks[0]} Start over with --overwrite_output_dir.")
    if found is None and resume != AUTO:
        raise UsageError(f"--resume {resume}: this folder has no checkpoint. Give a run's, a checkpoint's, or auto.")
    for remark in remarks:
        console.say(remark)
    return found


def _resumed_folder(config: RunConfig) -> Path | None:
    place = Path(config.resume or AUTO).expanduser()
    if (place / FOLDER).is_dir() and config.resume not in (None, AUTO):
        return place
    return place.parent.parent if place.parent.name == FOLDER else None


def _is_finished(folder: Path, config: RunConfig) -> bool:
    """Whether the record in a folder is that of a run that ended well, with its model."""
    has_model = not (config.do_train and config.save_model) or (folder / "model").is_dir()
    return has_model and (folder / SUMMARY).is_file()
