"""The plan of a training: its steps, the batch and learning rate of each, and when it is evaluated and saved."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cos598d.config import RunConfig
from cos598d.data.sampler import global_batches, steps_per_epoch
from cos598d.optimizers import schedule


@dataclass
class Position:
    """How far a training has come, between two steps.

    iteration: the number of steps so far.
    stepped: the number of steps that fp16 did not skip; the learning rate follows these.
    evaluated: the iteration after which the last evaluation ran; 0 before the first.
    """

    iteration: int = 0
    stepped: int = 0
    evaluated: int = 0


class Plan:
    """The steps of a run, the same on every rank and for every number of ranks.

    Epochs and iterations count from 1. The last epoch may be cut short, by --max_steps or by part of an epoch.
    """

    def __init__(self, config: RunConfig, examples: int, world_size: int):
        self.batch_size = config.total_batch_size(world_size)
        self.epoch_steps = steps_per_epoch(examples, self.batch_size)
        whole = math.ceil(config.num_train_epochs * self.epoch_steps)
        self.steps = config.max_steps if config.max_steps > 0 else whole
        self.learning_rate = schedule(config.lr_scheduler, config.learning_rate, config.warmup_steps, self.steps)
        self._examples, self._seed, self._eval_steps = examples, config.seed, config.eval_steps
        # By default after each of several epochs, unless --save_steps asks for checkpoints.
        saves = config.max_steps < 0 and config.num_train_epochs > 1 and not config.save_steps
        self._save_epochs = int(saves) if config.save_epochs is None else config.save_epochs
        self._save_steps = config.save_steps

    def epoch_of(self, iteration: int) -> int:
        """The epoch that an iteration belongs to."""
        return (iteration - 1) // self.epoch_steps + 1

    def ends_epoch(self, iteration: int) -> bool:
        """Whether the iteration is the last of its epoch."""
        return iteration % self.epoch_steps == 0 or iteration == self.steps

    def evaluates(self, at: Position) -> bool:
        """Whether the model is to be evaluated before the next step."""
        if at.iteration == at.evaluated:
            return False
        return self.ends_epoch(at.iteration) or _divides(self._eval_steps, at.iteration)

    def saves(self, at: Position) -> bool:
        """Whether a checkpoint is due before the next step, by the number of steps or of epochs."""
        ends_epoch = self.ends_epoch(at.iteration) and _divides(self._save_epochs, self.epoch_of(at.iteration))
        return ends_epoch or _divides(self._save_steps, at.iteration)

    def batches(self, after: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (epoch, global batch) for every iteration after iteration `after`. With 0, these are all iterations."""
        for epoch in range(self.epoch_of(after + 1), self.epoch_of(self.steps) + 1):
            before = (epoch - 1) * self.epoch_steps
            batches = global_batches(self._examples, self.batch_size, self._seed, epoch - 1)
            for batch in itertools.islice(batches, max(0, after - before), self.steps - before):
                yield epoch, batch


def _divides(interval: int | None, number: int) -> bool:
    return interval is not None and interval > 0 and number % interval == 0
