"""The pictures of a sync: of one recorded step on real ranks, in lanes and in the steps of its messages."""

from cos598d.strategies import STRATEGIES
from cos598d.terminal.words import number_of
from cos598d.tools.learn.picture.draw import Picture, draw
from cos598d.tools.learn.picture.steps import StepFrames, steps_of
from cos598d.tools.learn.picture.trial import PictureTrial, run_trial
from cos598d.tools.learn.picture.words import name_of, size

OF_SHARDS = (
    "First gradients are added up, each part at the rank that steps it; then the weights that come of it go to all."
)


def draw_sync(name: str, world_size: int, beside: str | None = None) -> tuple[Picture, StepFrames | None]:
    """Pictures of `--sync name`, and beside its lanes those of another; its steps, where it is made of messages.

    Raises as `run_trial` does.
    """
    trial = run_trial(name, world_size)
    other = run_trial(beside, world_size) if beside is not None else None
    note = _note(trial)
    steps = None
    if trial.messages:
        what = f"{name_of(name)} on {world_size} ranks, step by step: {name_of(trial.tensor, 24)}"
        try:
            steps = steps_of(trial.messages, what, OF_SHARDS if name in STRATEGIES else "")
        except ValueError as error:
            note = f"{note} No steps are drawn: {error}.".strip()
    elif trial.unsaid:
        note = f"{note} No steps are drawn: {name_of(trial.unsaid, 200)}.".strip()
    picture = draw(
        trial.events,
        other.events if other is not None else (),
        title=name_of(name),
        reference_title=name_of(beside or ""),
        note=note,
    )
    return picture, steps


def _note(trial: PictureTrial) -> str:
    """What the lanes do not show: the bytes of the ledger, and calls of which nobody knows when they were."""
    least, most = size(min(trial.sent)), size(max(trial.sent))
    sent = most if least == most else f"{least} to {most}"
    note = f"By the ledger a rank sent {sent} in this step."
    if trial.untimed:
        note += f" A library made {number_of(trial.untimed, 'call')} of each rank without telling when."
    return note
