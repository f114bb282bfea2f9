"""The options of gradient syncs. Each sync `takes` some of them, by name; those that are flags say so."""

from dataclasses import dataclass

from cos598d.sync import KNOWN, get_sync
from cos598d.terminal.fields import flag

SYNC_GROUP = "gradient sync"  # the heading of these flags in --help


@dataclass(frozen=True)
class SyncFlags:
    """The options that are flags of the command line. The size of a bucket is that of torch's DDP."""

    compress: str | None = flag(
        None, "compression: bf16, fp16, int8, topk, topk:SHARE, powersgd or powersgd:RANK", group=SYNC_GROUP
    )
    bucket_mb: float = flag(25.0, "capacity of a bucket in MiB, for syncs with buckets", group=SYNC_GROUP, above=0)
    sync_every: int = flag(
        1, "steps from one average of the weights to the next, for local_sgd and diloco", group=SYNC_GROUP, least=1
    )
    outer_learning_rate: float = flag(0.7, "outer optimizer's learning rate, for diloco", group=SYNC_GROUP, above=0)
    outer_momentum: float = flag(
        0.9, "outer optimizer's Nesterov momentum, for diloco", group=SYNC_GROUP, least=0, below=1
    )
    zero_stage: int = flag(
        2,
        "ZeRO stage of deepspeed: 1 optimizer state, 2 gradients too, 3 weights too",
        group=SYNC_GROUP,
        least=1,
        below=4,
    )


@dataclass(frozen=True)
class Options(SyncFlags):
    """All options of all syncs.

    find_unused_parameters: whether a step may leave a trainable parameter without a gradient on some rank. Finding out
        costs an all-reduce of 4 bytes per parameter in each step.
    broadcast_buffers: whether rank 0's buffers, such as running statistics, are sent to all ranks before the first
        forward after an average, as torch's DDP does.
    first_bucket_mb: the capacity of the first bucket, which is small so that its call starts early.
    gradient_as_bucket_view: whether each .grad becomes a view of its bucket, so that nothing is copied back. A script
        that keeps a gradient after `zero_grad` then finds it overwritten by the next step.
    gather_in_forward: stepped weights travel during the next forward. Then only a layer's forward may read them.
    """

    find_unused_parameters: bool = True
    broadcast_buffers: bool = True
    first_bucket_mb: float = 1.0
    gradient_as_bucket_view: bool = False
    gather_in_forward: bool = False


def or_choose(option: str) -> str:
    """The end of a sentence that rejects an option for one sync: the syncs that take it, if any."""
    names = [name for name in KNOWN if option in get_sync(name).takes]
    return f", or choose one of {', '.join(names)}" if names else ""
