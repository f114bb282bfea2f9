"""The contract of a payload codec."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from cos598d.comm import Call, Communicator
from cos598d.sync.buckets import Bucket

AllReduce = Callable[[torch.Tensor, str], Call]


class Pending(Protocol):
    """A call under way: `wait` blocks until its result is there."""

    def wait(self) -> None: ...


class Coded(NamedTuple):
    """What a codec has put on its way, and its call."""

    content: Any
    call: Call

    def wait(self) -> None:
        """Block until the call is over."""
        self.call.wait()


class Codec:
    """Sums buckets over the ranks in a smaller form than their own. One codec serves one sync for a whole training.

    Each bucket of a step is handed to `start` once, in the same order on every rank, and later to `finish`; between the
    two other work may go on. Every rank ends with the same bits.

    number_words: what its number may be, for errors; None if it has none.
    """

    number_words: str | None = None

    def __init__(self, comm: Communicator, all_reduce: AllReduce, number: float | None = None):
        """`all_reduce(tensor, name)` starts the sync's own way of summing a tensor over the ranks, in place."""
        self.comm, self.all_reduce, self.number = comm, all_reduce, number

    @classmethod
    def takes(cls, number: float) -> bool:
        """Whether `number` may be given."""
        return False

    def start(self, bucket: Bucket) -> Pending:
        """Encode the bucket's buffer and start its call."""
        raise NotImplementedError

    def finish(self, bucket: Bucket, pending: Pending) -> None:
        """Wait, and replace the buffer by its sum over the ranks, as near as the codec comes."""
        raise NotImplementedError


class Feedback:
    """Error feedback (Seide et al. 2014; Karimireddy et al. 2019): what a step did not send is added to the next.

    Costs as many bytes of memory as the gradient has.
    """

    def __init__(self) -> None:
        self._errors: dict[str, torch.Tensor] = {}

    def add_to(self, bucket: Bucket) -> torch.Tensor:
        """Add the bucket's error of the last step to its buffer, and return the tensor to keep the new one in.

        The new error is to be left there: the buffer as it is now, less what of it is sent.
        """
        error = self._errors.get(bucket.name)
        if error is None:
            error = self._errors[bucket.name] = torch.zeros_like(bucket.buffer)
        bucket.buffer += error
        return error

    def of(self, bucket: Bucket) -> torch.Tensor:
        """The tensor that keeps the bucket's error."""
        return self._errors[bucket.name]
