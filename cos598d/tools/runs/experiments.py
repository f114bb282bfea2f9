"""Three ready-made sweeps after a published study of BERT and ViT: batch size, learning rate, delay of links."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cos598d.tools.report.sweep_entries import BATCH, DELAY, SETUP

SETUPS = ("1x1", "1x4", "2x2")
# The published study's training: 8,000 examples for 5 epochs, evaluated on 2,000.
PUBLISHED = {
    "num_train_epochs": 5.0,
    "max_train_examples": 8000,
    "max_eval_examples": 2000,
    "gradient_accumulation_steps": 4,
}
PUBLISHED_BATCH = 4  # if batch is not an axis
TASKS = {"bert": "rte", "vit": "digits"}


Axes = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Experiment:
    """What a sweep varies, as a phrase for --help; by model its axes, and the sizes with which it ends within half an
    hour on two cores."""

    words: str
    grid: Mapping[str, Axes]
    sizes: Mapping[str, Mapping[str, Any]]


_BERT: dict[str, Any] = {"max_seq_length": 64, "max_eval_examples": 120, "num_train_epochs": 2.0}
_VIT: dict[str, Any] = {"num_train_epochs": 5.0}
EXPERIMENTS = {
    "experiment1": Experiment(
        "the batch of each rank, and the set-up",
        dict.fromkeys(TASKS, {BATCH: ("1", "4", "16"), SETUP: SETUPS}),
        {"bert": _BERT | {"max_train_examples": 240}, "vit": _VIT | {"max_train_examples": 480}},
    ),
    "experiment2": Experiment(
        "the learning rate, and the set-up",
        {
            "bert": {"learning_rate": ("2e-4", "5e-5", "2e-5"), SETUP: SETUPS},
            # Its weights start at random, and need higher rates.
            "vit": {"learning_rate": ("1e-3", "2e-4", "2e-5"), SETUP: SETUPS},
        },
        {"bert": _BERT | {"max_train_examples": 320}, "vit": _VIT},
    ),
    "experiment3": Experiment(
        "the delay between two hosts of two ranks each",
        dict.fromkeys(TASKS, {DELAY: ("0", "1ms", "10ms", "40ms"), SETUP: ("2x2",)}),
        {"bert": _BERT | {"max_train_examples": 320}, "vit": _VIT},
    ),
}


def ready_made(
    name: str, model: str, published: bool, own_grid: Axes, own_flags: Mapping[str, Any]
) -> tuple[dict[str, tuple[str, ...]], dict[str, Any]]:
    """An experiment's axes, and the flags that all of its runs share, with the user's own values in their place."""
    experiment = EXPERIMENTS[name]
    grid = {**experiment.grid[model], **own_grid}
    flags: dict[str, Any] = {"task_name": TASKS[model], "per_gpu_train_batch_size": PUBLISHED_BATCH}
    flags |= PUBLISHED if published else experiment.sizes[model]
    if BATCH in grid or "total_train_batch_size" in own_flags:
        del flags["per_gpu_train_batch_size"]
    return grid, {**{flag: value for flag, value in flags.items() if flag not in grid}, **own_flags}
