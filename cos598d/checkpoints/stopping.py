"""Why a training stops before its last step: signals."""

from collections.abc import Sequence

from cos598d.terminal.signals import ENDING, Requests


class Stopping:
    """Requests to end between two steps. The ranks agree on them at no cost.

    1. In every step each rank gives its `votes`, which are sent with the loss: the signals that it has received.
    2. Every rank passes their sums, which are equal, to `count`. Then `reason` is why all stop after this step, as a
       phrase; None: no request.
    3. While the ranks evaluate, no loss is sent. A rank that `is_asked` to end evaluates no further, and says so when
       the others have done their part.
    """

    reason: str | None = None

    def __init__(self, requests: Requests):
        self._requests = requests

    def is_asked(self) -> bool:
        """Whether this rank would vote for the end now."""
        return any(self.votes())

    def votes(self) -> list[float]:
        """This rank's votes, one for each signal."""
        return [float(self._requests.first == number) for number in ENDING]

    def count(self, sums: Sequence[float]) -> None:
        """Take the sums of all ranks' votes of one step."""
        asked = [number.name for number, votes in zip(ENDING, sums, strict=True) if votes]
        self.reason = f"stopped by {asked[0]}" if asked else None
