"""Sends only the largest gradients; the rest is added to the next step's."""

from collections.abc import Sequence

import torch

from cos598d.sync.buckets import Bucket
from cos598d.sync.codecs.base import Codec, Coded, Feedback
from cos598d.sync.cost import Even
from cos598d.sync.estimate import Tensor


class TopK(Codec[Coded]):
    """The k largest of each bucket's elements (Lin et al. 2018, "Deep Gradient Compression"), with error feedback.

    1. Every rank adds what it has not sent before, selects the k elements with the largest absolute values, and keeps
       the others for the next step.
    2. All ranks gather each other's k values and k indices.
    3. Every rank adds them up, in order of rank.

    `topk:0.01`, the default, sends 1 percent. Cost of a bucket of E elements: 1 call; every rank sends and receives
    (n-1) 8 k bytes, compared with 2(n-1)/n 4 E. So the ratio is E / (n k): 25 for 4 ranks at 1 percent, falling with n.
    """

    # In a ring: n-1 steps of a rank's whole payload.
    collective = Even("all_gather", lambda ranks: ranks - 1, lambda ranks: (ranks - 1, 1))
    default = 0.01
    number_words = "the share of elements to send, above 0 and at most 1"
    memory = "what topk has held back (its error feedback)"

    def set_up(self) -> None:
        self._feedback = self.keep(Feedback())

    @classmethod
    def takes(cls, number: float) -> bool:
        return 0 < number <= 1

    @classmethod
    def payloads(cls, bucket: Sequence[Tensor], ranks: int, number: float) -> list[tuple[int, int]]:
        count = _count(sum(tensor.numel() for tensor in bucket), number)
        return [(2 * count, 4)]  # values and indices

    def start(self, bucket: Bucket, scale: float = 1.0) -> Coded:
        error = self._feedback.add_to(bucket, scale)
        count = _count(bucket.buffer.numel(), self.number)
        places = bucket.buffer.abs().topk(count, sorted=False).indices
        values = bucket.buffer[places].float()
        torch.mul(bucket.buffer, 1 / scale, out=error)
        error[places] = 0
        packed = torch.cat([values, places.to(torch.int32).view(torch.float32)])
        return self.all_gather(packed, bucket.name)

    def put_back_unused(self, bucket: Bucket, is_used: Sequence[bool]) -> None:
        self._feedback.put_back(bucket, is_used)

    def finish(self, bucket: Bucket, pending: Coded) -> None:
        pending.wait()
        bucket.buffer.zero_()
        # An element that is not finite counts as largest, so every rank receives it.
        is_finite = torch.stack([packed.chunk(2)[0].isfinite().all() for packed in pending.content]).all()
        self._feedback.keep_if(is_finite, bucket.name)
        for packed in pending.content:
            values, places = packed.chunk(2)
            bucket.buffer.index_add_(0, places.view(torch.int32).long(), values.to(bucket.buffer.dtype))


def _count(elements: int, share: float) -> int:
    """How many of a bucket's elements are sent."""
    return min(elements, max(1, round(share * elements)))
