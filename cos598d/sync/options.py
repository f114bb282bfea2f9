"""The options that several gradient syncs take: fields of dataclasses, of which those that are flags say so.

Each sync names the class of its options as its `options_kind`, and has exactly the options of that class. An option of
one sync only is declared in that sync's file.
"""

import functools
from dataclasses import dataclass, field, fields, make_dataclass

from cos598d.sync import KNOWN, get_sync
from cos598d.sync.base import Options
from cos598d.terminal.fields import flag

SYNC_GROUP = "gradient sync"  # the heading of these flags in --help
WITH_FLAGS = ("bucketed", "diloco", "torch_fsdp", "deepspeed")  # together they have every flag, in the order of --help


@dataclass(frozen=True)
class BucketSizes(Options):
    """For syncs with buckets: the capacity of a bucket in MiB, and of the first one, which is small so that its call
    starts early. The defaults are those of torch's DDP."""

    bucket_mb: float = flag(25.0, "capacity of a bucket in MiB, for syncs with buckets", group=SYNC_GROUP, above=0)
    first_bucket_mb: float = 1.0


@dataclass(frozen=True)
class PackedOptions(Options):
    """For syncs whose buckets have a size of their own: one gradient, or all.

    gradient_as_bucket_view: whether each .grad becomes a view of its bucket, so that nothing is copied back. A script
        that keeps a gradient after `zero_grad` then finds it overwritten by the next step.
    compress: the codec, as in `codecs.py`; None for none.
    """

    gradient_as_bucket_view: bool = False
    compress: str | None = flag(
        None, "compression: bf16, fp16, int8, topk, topk:SHARE, powersgd or powersgd:RANK", group=SYNC_GROUP
    )


@dataclass(frozen=True)
class BucketOptions(BucketSizes, PackedOptions):
    """For syncs that may do everything with their buckets."""


@dataclass(frozen=True)
class PlainBucketOptions(BucketSizes):
    """For syncs whose buckets cannot be compressed."""

    gradient_as_bucket_view: bool = False


@functools.cache
def sync_flags() -> type:
    """A dataclass whose fields are the flags of all syncs."""
    kinds = [get_sync(name).options_kind for name in WITH_FLAGS]
    found = {one.name: one for kind in kinds for one in fields(kind) if "flag" in one.metadata}
    copies = [(one.name, one.type, field(default=one.default, metadata=one.metadata)) for one in found.values()]
    return make_dataclass("SyncFlags", copies, frozen=True)


def or_choose(option: str) -> str:
    """The end of a sentence that rejects an option for one sync: the syncs that take it, if any."""
    names = [name for name in KNOWN if option in get_sync(name).options_kind.names()]
    return f", or choose one of {', '.join(names)}" if names else ""
