"""The options of gradient syncs: fields of a dataclass, of which those that are flags say so next to their default.

Each sync names the class of its options as its `options_kind`, and has exactly the options of that class. An option of
one sync only is declared in that sync's file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from cos598d.terminal.fields import flag

SYNC_GROUP = "gradient sync"  # the heading of these flags in --help


@dataclass(frozen=True)
class Options:
    """What every sync may be told.

    find_unused_parameters: whether a step may leave a trainable parameter without a gradient on some rank. Finding out
        costs an all-reduce of 4 bytes per parameter in each step.
    broadcast_buffers: whether rank 0's buffers, such as running statistics, are sent to all ranks before the first
        forward after an average, as torch's DDP does.
    """

    find_unused_parameters: bool = True
    broadcast_buffers: bool = True

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all options of this kind."""
        return tuple(one.name for one in fields(cls))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Those of the `values` that are options of this kind; the others are another sync's."""
        return cls(**{name: values[name] for name in cls.names() if name in values})


@dataclass(frozen=True)
class BucketSizes(Options):
    """For syncs with buckets: the capacity of a bucket in MiB, and of the first one, which is small so that its call
    starts early. The defaults are those of torch's DDP."""

    bucket_mb: float = flag(25.0, "capacity of a bucket in MiB, for syncs with buckets", group=SYNC_GROUP, above=0)
    first_bucket_mb: float = 1.0


@dataclass(frozen=True)
class BucketViews(Options):
    """For syncs that pack gradients: whether each .grad becomes a view of its bucket, so that nothing is copied back.

    A script that keeps a gradient after `zero_grad` then finds it overwritten by the next step.
    """

    gradient_as_bucket_view: bool = False


@dataclass(frozen=True)
class Compression(Options):
    """For syncs whose buckets may be compressed: the codec, as in `codecs.py`; None for none."""

    compress: str | None = flag(
        None, "compression: bf16, fp16, int8, topk, topk:SHARE, powersgd or powersgd:RANK", group=SYNC_GROUP
    )
