"""The interface of a codec for gradient compression."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch

from cos598d.comm.calls import Pending
from cos598d.comm.communicator import Communicator
from cos598d.comm.messages import Messages, PointToPointCollective
from cos598d.sync.buckets import Bucket, RowBucket
from cos598d.sync.cost import Collective
from cos598d.sync.estimate import Tensor

AllReduce = Callable[[torch.Tensor, str], Pending]


class Coded(NamedTuple):
    """What a codec is sending, and its call."""

    content: Any
    call: Pending

    def wait(self) -> None:
        """Block until the call is over."""
        self.call.wait()


class _Gathering:
    """An all-gather among some ranks, made of messages, that has been started."""

    def __init__(self, messages: Messages, call: PointToPointCollective):
        self._messages, self._call = messages, call

    def wait(self) -> None:
        """Block until all parts have arrived, and enter the call in the ledger. May be called more than once."""
        self._messages.wait()
        self._call.end()


class Kept:
    """Tensors that each step keeps for the next, by name. A step that is skipped keeps nothing.

    There are two tensors for each name, used in turn: one from the last good step, and one for this step. `keep_if`
    protects loops that do not report skipped steps.
    """

    def __init__(self) -> None:
        self._pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._left: dict[str, torch.Tensor | bool] = {}

    def __len__(self) -> int:
        return len(self._pairs)

    def begin(self, name: str, first: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Begin a step: return the last good step's tensor (`first()` if there is none) and the tensor to write."""
        if name not in self._pairs:
            self._pairs[name] = first(), first()
        elif self._left.get(name, False):
            self._pairs[name] = self._pairs[name][::-1]
        self._left[name] = True
        return self._pairs[name]

    def left(self, name: str) -> torch.Tensor:
        """The tensor to write in this step, again."""
        return self._pairs[name][1]

    def keep_if(self, is_finite: torch.Tensor, name: str) -> None:
        """This step's tensor counts only if `is_finite`, one bool that is the same on every rank.

        It is read when the next step begins, so that nothing waits for a device now.
        """
        self._left[name] = is_finite

    def forget(self, name: str) -> None:
        """Discard this step's tensor of a name, so that the previous one stays."""
        self._left.pop(name, None)

    def forget_step(self) -> None:
        """Discard all of this step's tensors, so that the previous ones stay."""
        self._left.clear()

    def state(self) -> dict[str, torch.Tensor]:
        """The last good step's tensors, by name."""
        return {name: pair[bool(self._left.get(name, False))] for name, pair in self._pairs.items()}

    def load(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Set the last good step's tensors."""
        self._pairs = {
            name: (tensor.to(device, copy=True), tensor.to(device, copy=True)) for name, tensor in tensors.items()
        }
        self._left = {}


class Feedback(Kept):
    """Error feedback (Seide et al. 2014; Karimireddy et al. 2019): what a step did not send is added to the next.

    Errors are kept unscaled, since the loss scale changes between steps. They take twice the gradient's memory.

    Errors of `Rows` are kept by row number, in one tensor for all rows of the parameter. An error waits until a step
    looks up its row again. A step's errors are written there when the next step begins, and only if the step counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of_rows: dict[str, torch.Tensor] = {}  # from good steps, in the parameter's shape
        self._places: dict[str, torch.Tensor] = {}  # the rows of the last step

    def add_to(self, bucket: Bucket, scale: float) -> torch.Tensor:
        """Add `scale` times the bucket's error to its buffer, and return the tensor for the new error.

        Write there: (the buffer as it is now - what of it is sent) / `scale`.
        """
        if isinstance(bucket, RowBucket):
            self._begin_rows(bucket)
        error, new = self.begin(bucket.name, lambda: torch.zeros_like(bucket.buffer))
        bucket.buffer.add_(error, alpha=scale)
        return new

    def state(self) -> dict[str, torch.Tensor]:
        for name in self._of_rows:
            self._end_rows(name)
        return super().state() | self._of_rows

    def load(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        of_rows = {name: tensor for name, tensor in tensors.items() if tensor.dim() > 1}
        super().load({name: tensor for name, tensor in tensors.items() if name not in of_rows}, device)
        self._of_rows = {name: tensor.to(device, copy=True) for name, tensor in of_rows.items()}
        self._places = {}

    def _begin_rows(self, bucket: RowBucket) -> None:
        name, parameter = bucket.parameters[0]
        if name not in self._of_rows:
            self._of_rows[name] = torch.zeros_like(parameter)
        self._end_rows(name)
        errors = self._of_rows[name][bucket.rows].view(-1)
        self._pairs[name] = errors, torch.empty_like(errors)
        self._places[name] = bucket.rows

    def _end_rows(self, name: str) -> None:
        """End the last step: write the errors of its rows back, if it counts."""
        rows = self._places.pop(name, None)
        if rows is None:
            return
        _, new = self._pairs.pop(name)
        errors = self._of_rows[name]
        if self._left.pop(name, False):
            errors[rows] = new.view(-1, *errors.shape[1:])

    def put_back(self, bucket: Bucket, is_used: Sequence[bool]) -> None:
        """Keep the old error, whether or not this step counts, for the bucket's parameters that are not `is_used`."""
        sizes = [view.numel() for view in bucket.views]
        old, new = (tensor.split(sizes) for tensor in self._pairs[bucket.name])
        for place, used in enumerate(is_used):
            if not used:
                new[place].copy_(old[place])


Sent = TypeVar("Sent", bound=Pending)  # what a codec is sending between `start` and `finish`
KeptKind = TypeVar("KeptKind", bound=Kept)


class Codec(Generic[Sent]):
    """Sums compressed buckets over the ranks. One codec serves one sync for a whole training.

    Each bucket of a step is passed to `start` once, in the same order on every rank, and later to `finish`. Other work
    may run in between. Every rank ends with the same bits. If some rank's gradient is not finite, neither is the sum.

    number_words: the valid numbers, as a phrase for errors, and `default` the number used by default; None if it takes
        none.
    collective: how its payload is sent, for the cost model; None: by the sync's own collective.
    memory: what it keeps from step to step, as a phrase for the user; None if nothing.
    """

    number_words: str | None = None
    default: float = 0
    collective: Collective | None = None
    memory: ClassVar[str | None] = None

    def __init__(
        self, comm: Communicator, all_reduce: AllReduce, number: float | None = None, members: Sequence[int] = ()
    ):
        """`all_reduce(tensor, name)` starts the sync's own sum of a tensor over the ranks, in place.

        members: the ranks among which buckets are sent, including this one; by default all.
        """
        self.comm, self.all_reduce = comm, all_reduce
        self.number = self.default if number is None else number
        self.members = list(members) or list(range(comm.world_size))
        self._kept: dict[str, Kept] = {}  # by their prefix in the state
        self.set_up()

    def set_up(self) -> None:
        """Create what this codec keeps from step to step. Nothing by default."""

    def keep(self, kept: KeptKind, prefix: str = "") -> KeptKind:
        """Save `kept` with the state, under names with this prefix, and discard its tensors of a skipped step."""
        self._kept[prefix] = kept
        return kept

    @classmethod
    def takes(cls, number: float) -> bool:
        """Whether `number` is valid."""
        return False

    @classmethod
    def payloads(cls, bucket: Sequence[Tensor], ranks: int, number: float) -> list[tuple[int, int]]:
        """What is sent among `ranks` for a bucket of these tensors: (elements, bytes per element) for each call."""
        raise NotImplementedError

    def start(self, bucket: Bucket, scale: float = 1.0) -> Sent:
        """Encode the bucket's buffer and start its call. This step's gradients are multiplied by `scale`."""
        raise NotImplementedError

    def all_gather(self, tensor: torch.Tensor, name: str) -> Coded:
        """Start an all-gather of tensors of one shape among the members. The content is their list, in rank order."""
        if len(self.members) == self.comm.world_size:
            return Coded(*self.comm.all_gather(tensor, name, async_op=True))
        call, me = self.comm.compose("all_gather", tensor, name), self.comm.rank
        parts = [tensor if rank == me else torch.empty_like(tensor) for rank in self.members]
        others = [(part, rank) for part, rank in zip(parts, self.members, strict=True) if rank != me]
        return Coded(parts, _Gathering(call.start([(tensor, rank) for _, rank in others], others), call))

    def finish(self, bucket: Bucket, pending: Sent) -> None:
        """Wait, and replace the buffer by its sum over the ranks, up to the codec's error."""
        raise NotImplementedError

    def put_back_unused(self, bucket: Bucket, is_used: Sequence[bool]) -> None:
        """After `finish`: drop the sums of the bucket's parameters that are not `is_used`, since no rank used them.

        The errors that an earlier step kept for them did not reach the optimizer, so they are kept again. Nothing to do
        if nothing is kept.
        """

    def forget_step(self) -> None:
        """The optimizer skipped this step: drop what the step kept for the next."""
        for kept in self._kept.values():
            kept.forget_step()

    def own_state(self) -> dict[str, torch.Tensor]:
        """What this rank keeps between two steps, by name."""
        return {prefix + name: each for prefix, kept in self._kept.items() for name, each in kept.state().items()}

    def load_own_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `own_state` gave, before the first step."""
        for prefix, kept in self._kept.items():
            mine = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
            kept.load(mine, self.comm.device)


class AsTheyAre(Codec[Pending]):
    """No compression: the sync's all-reduce sums the bucket's own buffer, in place."""

    def start(self, bucket: Bucket, scale: float = 1.0) -> Pending:
        return self.all_reduce(bucket.buffer, bucket.name)

    def finish(self, bucket: Bucket, pending: Pending) -> None:
        pending.wait()
