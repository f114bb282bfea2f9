"""The flags of a run's life: when it is evaluated, when it is saved, when it stops, and how it goes on."""

from dataclasses import dataclass

from cos598d.errors import UsageError
from cos598d.fields import flag

GROUP = "checkpoints and stopping"  # where --help lists them
LOSS_METRIC = "validation_loss"


@dataclass(frozen=True)
class LifeFlags:
    """What may happen between two steps of a training."""

    eval_steps: int | None = flag(
        None, "evaluate every so many steps, too, not only after every epoch", group=GROUP, least=1
    )
    early_stopping: str | None = flag(
        None,
        f"stop when so many evaluations in a row were no better than the best (by {LOSS_METRIC}, or the METRIC "
        "given), and end with the best model",
        group=GROUP,
        metavar="PATIENCE[:METRIC]",
    )
    log_every: int | None = flag(
        None,
        "after the first five, print one iteration of so many (default: where there is no bar, every few seconds)",
        group=GROUP,
        least=1,
        is_local=True,
    )

    def patience(self) -> int | None:
        """How many evaluations may be no better than the best; None for any number.

        Raises UsageError for what is no number of at least 1, with or without a metric behind it.
        """
        if self.early_stopping is None:
            return None
        number, colon, metric = self.early_stopping.partition(":")
        if not number.isascii() or not number.isdigit() or int(number) < 1 or (colon and not metric):
            raise UsageError(
                f"--early_stopping {self.early_stopping}: give a number of evaluations of at least 1, or "
                f"that and a metric, as 3:{LOSS_METRIC}."
            )
        return int(number)

    def metric(self) -> str:
        """The metric by which one evaluation is better than another."""
        return (self.early_stopping or "").partition(":")[2] or LOSS_METRIC

    def check_life(self, do_eval: bool, metrics: tuple[str, ...]) -> None:
        """Raise UsageError for flags that cannot work; `metrics` are the task's."""
        self.patience()
        for name in ("eval_steps", "early_stopping"):
            if getattr(self, name) is not None and not do_eval:
                raise UsageError(f"--{name} {getattr(self, name)} needs evaluations: add --do_eval.")
        if self.metric() not in (LOSS_METRIC, *metrics):
            raise UsageError(
                f"--early_stopping {self.early_stopping}: there is no metric {self.metric()!r}; the known ones are "
                f"{', '.join((LOSS_METRIC, *metrics))}."
            )
