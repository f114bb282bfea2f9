"""A rank's random states, as tensors: what makes dropout go on as if the run had not stopped."""

from collections.abc import Mapping

import torch

from cos598d.errors import UserError, first_line

CPU, CUDA = "random_cpu", "random_cuda"


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of torch's generators that a training on `device` draws from, by name."""
    states = {CPU: torch.get_rng_state()}
    if device.type == "cuda":
        states[CUDA] = torch.cuda.get_rng_state(device)
    return states


def load_random_states(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Go on from what `random_states` gave, on the same kind of device: the last thing before the next step.

    A generator of which `states` has nothing stays as it is. Raises UserError where they cannot be such states.
    """
    try:
        if CPU in states:
            torch.set_rng_state(states[CPU])
        if device.type == "cuda" and CUDA in states:
            torch.cuda.set_rng_state(states[CUDA], device)
    except (RuntimeError, TypeError) as error:
        raise UserError(
            f"the checkpoint's random states cannot be taken up ({first_line(error)}): resume from another checkpoint."
        ) from None
