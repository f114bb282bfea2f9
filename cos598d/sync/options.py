"""The options that gradient syncs share: their flags on the command line, and what only the program sets.

A sync or strategy with options of its own declares them in its own file, in a subclass of SyncOptions that it names as
its `options_kind` (`cos598d/sync/ddp.py`).
"""

from dataclasses import dataclass, fields
from typing import Self

from cos598d.terminal.fields import flag

SYNC_GROUP = "gradient sync"  # the heading of the flags of syncs and strategies in --help


@dataclass(frozen=True)
class SyncFlags:
    """The flags that several syncs share. A sync lists the flags that it `uses`, and refuses the others.

    bucket_mb: capacity of a bucket in MiB (torch DDP's default).
    compress: the compressor of the buckets (`cos598d/sync/codecs`); None: buckets are sent uncompressed.
    sync_every: the steps from one average to the next, for syncs that average weights.
    """

    bucket_mb: float = flag(25.0, "capacity of a bucket in MiB, for syncs with buckets", group=SYNC_GROUP, above=0)
    compress: str | None = None  # RunConfig makes it a flag, with the names of the compressors
    sync_every: int = flag(
        1, "steps from one average of the weights to the next, for local_sgd and diloco", group=SYNC_GROUP, least=1
    )


@dataclass(frozen=True)
class SyncOptions(SyncFlags):
    """The options that every sync's constructor takes: the shared flags, and options that have no flag.

    first_bucket_mb: capacity in MiB of the first bucket to fill up. It is small, so that the first call starts early
    (torch DDP's default).
    copies_gradients: whether averages are copied back into the gradients that autograd made. A script that keeps such
    a gradient finds it unchanged. The training loop keeps none, and its gradients are views of the buckets.
    broadcast_buffers: whether rank 0's buffers are sent at the start, and by torch's DDP before a step's first forward.
    """

    first_bucket_mb: float = 1.0
    copies_gradients: bool = False
    broadcast_buffers: bool = True

    @classmethod
    def of(cls, options: "SyncOptions") -> Self:
        """`options` as options of this class. Those that they lack have their defaults."""
        if isinstance(options, cls) or not isinstance(options, SyncOptions):  # the second: a class of the user's
            return options
        return cls(**{one.name: getattr(options, one.name) for one in fields(cls) if hasattr(options, one.name)})


DEFAULTS = SyncOptions()
