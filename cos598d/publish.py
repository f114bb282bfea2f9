"""What a run writes to its folder at the end: the summary, the record files, and the model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cos598d.comm.communicator import Communicator
from cos598d.config import RunConfig
from cos598d.errors import UserError
from cos598d.inputs import RunInputs
from cos598d.measure.record import RunRecord
from cos598d.models.checkpoint import CannotSave, save_model
from cos598d.records.conventions import BY_LEDGER, MODEL, MODEL_FILES
from cos598d.terminal.files import whole_folder


def publish_record(
    record: RunRecord, comm: Communicator, setting: Mapping[str, Any], files: Mapping[str, Any], keeps_model: bool
) -> None:
    """Give the files of a run that ended well their final names, the summary last. Every rank calls it.

    `setting` are the summary's facts and `files` are as `RunRecord.stage` takes them; both count on rank 0. An earlier
    run's model is deleted unless `keeps_model`. Raises UserError if the disk refuses. An earlier run's record is kept
    until all of the new one is on the disk.
    """
    shares = comm.collect(record.share())
    record.complete()
    if shares is not None:  # on rank 0
        record.stage(dict(setting), shares, files)
    comm.exchange("the whole record is on the disk under temporary names")
    if comm.rank == 0:
        record.remove_old(with_model=not keeps_model)
    comm.exchange("an earlier run's record is deleted")
    record.publish()
    comm.exchange("the rows have their final names")
    if comm.rank == 0:
        record.publish_summary()


def save_run_model(output: Path, model: torch.nn.Module, encoder: Any) -> None:
    """Save the model next to the run's published record. It replaces an earlier run's model."""
    place = output / MODEL
    try:
        with whole_folder(place, MODEL_FILES) as folder:
            save_model(folder, model, encoder)
    except (CannotSave, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.reason
        old = ", and the model there is still an earlier run's" if place.exists() else ""
        raise UserError(
            f"the model cannot be saved as {place} ({reason}). The run's other files in {output} are complete{old}. "
            "Make room there."
        ) from error


def summary_facts(config: RunConfig, inputs: RunInputs, comm: Communicator, parameters: int) -> dict[str, Any]:
    """The summary's facts that are not measurements. `parameters` is the model's number of weights."""
    return {
        "task": inputs.task.name,
        "label": config.label,
        "sync": config.sync,
        "world_size": comm.world_size,
        "backend": config.backend,
        "bytes_are_assumed": comm.bytes_are_assumed,
        "bytes_from": BY_LEDGER,
        "device": comm.device.type,
        "model": inputs.source.description,
        "data": inputs.data_words,
        **({"classes": list(inputs.task.classes)} if inputs.task.tells_classes else {}),
        "parameters": parameters,
        "total_train_batch_size": config.total_batch_size(comm.world_size),
        "max_seq_length": config.max_seq_length,
        "dropout": config.dropout,
        "precision": config.precision,
        "seed": config.seed,
    }
