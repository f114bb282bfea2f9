"""How a run resumes: in which folder, from which checkpoint, and whether it is the same run."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cos598d.checkpoints import AUTO, FOLDER, Checkpoint, Forms, find, has_checkpoints, remove_all
from cos598d.checkpoints.snapshot import RECORD
from cos598d.comm.communicator import Communicator
from cos598d.config import RunConfig
from cos598d.data.examples import Examples
from cos598d.errors import UsageError, UserError
from cos598d.measure.claim import was_left
from cos598d.measure.loggers import Logger
from cos598d.measure.monitor import Monitor
from cos598d.measure.record import RunRecord
from cos598d.models.build import ModelSource
from cos598d.plan import Plan
from cos598d.records.conventions import ITERATIONS
from cos598d.records.run import CONFIG, read_object, read_summary
from cos598d.records.saved import facts_after, training_after
from cos598d.terminal.console import Console
from cos598d.terminal.printable import printable
from cos598d.world.exit import resumes_by

# If one of these flags changes, it is another run. The sync, the ranks and the times of saving may change.
SAME_FLAGS = (
    *("task_name", "max_seq_length", "max_train_examples", "augment", "dropout", "precision", "seed", "optimizer"),
    *("learning_rate", "lr_scheduler", "warmup_steps", "weight_decay", "adam_epsilon", "momentum", "max_grad_norm"),
)
# Facts that no flag of SAME_FLAGS gives, and their names in a sentence; for digests, the complete phrase.
OTHERS = {
    "total_train_batch_size": "--total_train_batch_size",
    "steps": "--num_train_epochs or --max_steps, in steps,",
    "model": "--model_name_or_path",
}
DIGESTS = {
    "configuration": "the model's configuration differs",
    "data": "the training data differ",
    "evaluation": "the evaluation data differ",
}

SUMMARY = "summary.json"


def named_folder(config: RunConfig) -> Path | None:
    """The run's folder, if flags name it: --output_dir, or that of the run whose checkpoint --resume names."""
    return Path(config.output_dir) if config.output_dir is not None else _resumed_folder(config)


def is_ours(folder: Path, config: RunConfig) -> bool:
    """Whether `folder`, which is not empty, belongs to an earlier attempt of this run, on this host."""
    if config.resume is None:
        return False
    resumed = _resumed_folder(config)
    is_named = config.resume == AUTO or (resumed is not None and resumed.resolve() == folder.resolve())
    if not is_named:
        return False
    if has_checkpoints(folder / FOLDER) or was_left(folder) or _is_finished(folder, config):
        return True
    # Rows of ranks on another host than rank 0, whose summary did not exist yet.
    return any(folder.glob(ITERATIONS.format(rank="*"))) and not (folder / SUMMARY).is_file()


def say_if_finished(folder: Path, config: RunConfig, comm: Communicator, console: Console) -> bool:
    """Whether the run to resume has nothing left to do, the same on every rank. If so, print that.

    Raises UsageError, the same on every rank, if its flags make it another run.
    """
    if config.resume is None or config.resume_anyway:
        return False
    is_finished, changes = False, ""
    if comm.rank == 0 and _is_finished(folder, config):
        is_finished, changes = True, "; ".join(_changed_flags(folder, config, comm.world_size))
    is_finished, changes = comm.exchange([is_finished, changes])[0]
    if changes:
        raise UsageError(
            f"the run in {folder} is finished, and this one differs: {changes}. Choose another folder, or add "
            "--resume_anyway to continue from its last checkpoint."
        )
    if is_finished:
        console.say(f"the run in {folder} is finished, so nothing is left to train.")
    return is_finished


def find_checkpoint(
    folder: Path,
    config: RunConfig,
    facts: Mapping[str, Any],
    comm: Communicator,
    console: Console,
    any_precision: bool = False,
) -> Checkpoint | None:
    """The checkpoint that --resume names; None without --resume, or if `auto` finds none.

    With `any_precision`, its precision may differ from that in `facts`: the run then continues in the checkpoint's. The
    result is the same on every rank. Raises UsageError if the named one cannot be used, if all are damaged, or if it is
    another run's by its `facts`.
    """
    if config.resume is None:
        return None
    found = find(config.resume, folder / FOLDER, comm, Forms(training_after, facts_after))
    if found is None:
        if comm.exchange((folder / SUMMARY).is_file() and not config.overwrite_output_dir)[0]:
            raise UsageError(
                f"there is no checkpoint to resume from in {folder}, which has a finished run. Choose another "
                "folder, or add --overwrite_output_dir."
            )
        console.say(f"there is no checkpoint in {folder}: training starts from scratch")
        return None
    for sentence in found.remarks:
        console.say(sentence)
    compared = {name: value for name, value in facts.items() if name != "evaluation" or config.early_stopping}
    before = found.training["facts"]
    if any_precision and before.get("precision") != facts["precision"]:
        console.say(f"the run continues in {printable(before['precision'], 20)}, the precision that it was saved in")
        compared.pop("precision")
    changes = [
        _difference(name, before.get(name), value) for name, value in compared.items() if before.get(name) != value
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
    comm: Communicator,
    found: Checkpoint | None,
    monitor: Monitor | None = None,
    loggers: Sequence[Logger] = (),
) -> RunRecord:
    """The run's record, one over all attempts: it continues from `found`, or begins.

    If a run starts over in a folder that is overwritten, an earlier run's rows and checkpoints are removed at once:
    they could be mistaken for this one's. Raises UserError if they cannot be removed.
    """
    rank, world_size = comm.rank, comm.world_size
    saves = config.save_steps or config.save_epochs or config.save_seconds
    resumes_by(f"--resume {_resume_word(folder, config)}" if saves and config.resume != AUTO else "")
    if found is not None:
        at, place = found.facts_of_ranks(RECORD, comm)[0]["iteration"], found.path.parent.parent
        return RunRecord(folder, rank, monitor, loggers, world_size=world_size, resume_at=at, resumed_from=place)
    if rank == 0 and config.do_train:
        try:
            remove_all(folder / FOLDER)
        except OSError as error:
            raise UserError(
                f"an earlier run's checkpoint cannot be removed ({error.filename}: {error.strerror}), and it would "
                "be taken for one of this run. Choose another --output_dir."
            ) from None
    comm.exchange("an earlier run's files are removed")
    return RunRecord(folder, rank, monitor, loggers, world_size=world_size)


def how_to_go_on(folder: Path, config: RunConfig) -> str:
    """What to do to resume a run that was stopped, as a sentence for the user."""
    if config.resume == AUTO:
        return "To go on, run the same command again."
    if config.resume is not None and not has_checkpoints(folder / FOLDER):  # the disk has kept nothing of this attempt
        return "To start over, run the same command with --overwrite_output_dir."
    return f"To go on, run the same command with --resume {_resume_word(folder, config)}."


def _resume_word(folder: Path, config: RunConfig) -> str:
    return AUTO if config.output_dir is not None else str(folder)


def facts_of(
    config: RunConfig, plan: Plan, features: Examples, evaluated: Mapping[str, Examples], source: ModelSource
) -> dict[str, Any]:
    """What must be equal in every attempt of a run, as JSON values. `evaluated` counts if it can end the run."""
    facts = {name: getattr(config, name) for name in SAME_FLAGS}
    facts |= {"total_train_batch_size": plan.batch_size, "steps": plan.steps, "model": source.description}
    configuration = hashlib.sha256(source.config.to_json_string().encode()).hexdigest()
    data = {part: [len(examples), examples.digest()] for part, examples in evaluated.items()}
    return facts | {
        "configuration": configuration,
        "data": [len(features), features.digest()],
        "evaluation": data,
    }


def _difference(name: str, before: Any, now: Any) -> str:
    return DIGESTS.get(name) or f"{OTHERS.get(name, f'--{name}')} was {printable(before, 100)} and is {now}"


def _resumed_folder(config: RunConfig) -> Path | None:
    if config.resume in (None, AUTO):
        return None
    place = Path(config.resume or "").expanduser()
    if (place / FOLDER).is_dir():
        return place
    inside = next((one for one in (place, place.parent) if one.name == FOLDER), None)
    return inside and inside.parent


def _is_finished(folder: Path, config: RunConfig) -> bool:
    """Whether the record in a folder is that of a run that ended well, with its model."""
    has_model = not (config.do_train and config.save_model) or (folder / "model").is_dir()
    return has_model and (folder / SUMMARY).is_file() and not was_left(folder)


def _changed_flags(folder: Path, config: RunConfig, world_size: int) -> list[str]:
    """How this run's flags differ from those of the finished one in a folder, as phrases.

    Raises UserError if its record is damaged.
    """
    before = read_object(folder / "config.json", CONFIG) or {}
    now = {name: getattr(config, name) for name in (*SAME_FLAGS, "model_name_or_path", "max_steps")}
    if config.max_steps < 0:
        now["num_train_epochs"] = config.num_train_epochs
    changed = [
        _difference(name, before[name], value) for name, value in now.items() if before.get(name, value) != value
    ]
    batch, summary = config.total_batch_size(world_size), read_summary(folder)
    if summary["total_train_batch_size"] != batch:
        changed.append(_difference("total_train_batch_size", summary["total_train_batch_size"], batch))
    return changed
