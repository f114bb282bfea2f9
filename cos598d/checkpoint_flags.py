"""The flags for checkpoints: when a run is evaluated and saved, when it stops, and how it resumes."""

from dataclasses import dataclass

from cos598d.errors import UsageError
from cos598d.terminal.fields import flag, flags_of, given

GROUP = "checkpoints and stopping"  # their heading in --help
LOSS_METRIC = "validation_loss"


@dataclass(frozen=True)
class CheckpointFlags:
    """The flags for evaluating, saving and stopping between two steps."""

    save_steps: int | None = flag(
        None, "steps from one checkpoint to the next, in checkpoints/ of the run's folder", group=GROUP, least=1
    )
    save_epochs: int | None = flag(
        None,
        "epochs from one checkpoint to the next; 0: none (default: 1 if --num_train_epochs is above 1)",
        group=GROUP,
        least=0,
    )
    keep: int = flag(2, "how many of the newest checkpoints to keep", group=GROUP, least=1)
    resume: str | None = flag(
        None,
        "auto: resume from the newest complete checkpoint in --output_dir, if there is one",
        group=GROUP,
        choices=("auto",),
    )
    resume_anyway: bool = flag(False, "resume even if changed flags make it a different run", group=GROUP)
    eval_steps: int | None = flag(None, "also evaluate every N steps, not only after every epoch", group=GROUP, least=1)
    log_every: int | None = flag(
        None,
        "print the first five iterations, then every Nth (default: one every few seconds, or a progress bar)",
        group=GROUP,
        least=1,
        is_local=True,
    )

    def check_life(self, do_train: bool, do_eval: bool, output_dir: str | None) -> None:
        """Raise UsageError for flags that cannot work."""
        if not do_train:
            for name in given(self, flags_of(CheckpointFlags)):
                raise UsageError(f"--{name} is for training. Leave it out, or add --do_train.")
        if self.resume == "auto" and output_dir is None:
            raise UsageError("--resume auto looks in the run's folder. Give --output_dir.")
        if self.resume_anyway and self.resume is None:
            raise UsageError("--resume_anyway has no effect without --resume. Leave it out, or add --resume.")
        if self.eval_steps is not None and not do_eval:
            raise UsageError(f"--eval_steps {self.eval_steps} needs evaluations. Add --do_eval.")
