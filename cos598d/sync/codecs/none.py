"""Gradients as they are."""

from cos598d.comm.calls import Pending
from cos598d.sync.buckets import Bucket
from cos598d.sync.codecs.base import Codec


class AsTheyAre(Codec[Pending]):
    """The codec that does nothing: the bucket's own buffer travels.

    1. The sync's all-reduce sums the buffers, in place.
    """

    def start(self, bucket: Bucket, scale: float = 1.0) -> Pending:
        return self.all_reduce(bucket.buffer, bucket.name)

    def finish(self, bucket: Bucket, pending: Pending) -> None:
        pending.wait()
