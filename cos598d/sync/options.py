"""The options of a gradient sync: its flags on the command line, and what only the program sets."""

from dataclasses import dataclass

from cos598d.terminal.fields import flag

SYNC_GROUP = "gradient sync"  # the heading of the flags below in --help


@dataclass(frozen=True)
class SyncFlags:
    """The flags of syncs. A sync lists the flags that it `uses`, and refuses the others.

    bucket_mb: capacity of a bucket in MiB (torch DDP's default).
    compress: the compressor of the buckets (`cos598d/sync/codecs`); None: buckets are sent uncompressed.
    sync_every: the steps from one average to the next, for syncs that average weights.
    fragments: the number of parts that weights are averaged in, one after the other, for diloco.
    outer_learning_rate, outer_momentum: of diloco's outer optimizer.
    bucket_view: whether torch's DDP lets gradients be views of its buckets, so that none is copied back.
    ddp_hook: the communication hook of torch's DDP; None: its own all-reduce.
    reshard: "yes" frees gathered parameters after their layer's forward and gathers them again for backward.
    reduce_scatter: the implementation that sums gradients by shards: "ours" (messages) or "torch" (the backend's).
    zero_stage: what DeepSpeed shards: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 weights too.
    fabric_strategy: the strategy of Lightning Fabric.
    pack_gradients: whether sparse_zero1 sends gradients in fewer bits, without loss.
    """

    bucket_mb: float = flag(25.0, "capacity of a bucket in MiB, for syncs with buckets", group=SYNC_GROUP, above=0)
    compress: str | None = None  # RunConfig makes it a flag, with the names of the compressors
    sync_every: int = flag(
        1, "steps from one average of the weights to the next, for local_sgd and diloco", group=SYNC_GROUP, least=1
    )
    fragments: int = flag(
        16, "parts of the weights that diloco averages one after the other", group=SYNC_GROUP, least=1, below=10_000
    )
    outer_learning_rate: float = flag(0.7, "outer optimizer's learning rate, for diloco", group=SYNC_GROUP, above=0)
    outer_momentum: float = flag(
        0.9, "outer optimizer's Nesterov momentum, for diloco", group=SYNC_GROUP, least=0, below=1
    )
    bucket_view: bool = flag(
        False, "let gradients be views of the buckets, for ddp: torch's gradient_as_bucket_view", group=SYNC_GROUP
    )
    ddp_hook: str | None = flag(
        None,
        "communication hook of torch's DDP, for ddp: one of {choices}",
        group=SYNC_GROUP,
        choices=("fp16", "powersgd", "post_localsgd"),
    )
    reshard: str = flag(
        "yes",
        "free gathered weights after each layer's forward, for torch_fsdp and fabric: {choices}",
        group=SYNC_GROUP,
        choices=("yes", "no"),
    )
    reduce_scatter: str = flag(
        "ours",
        "implementation of reduce-scatter, for torch_fsdp: {choices}",
        group=SYNC_GROUP,
        choices=("ours", "torch"),
    )
    zero_stage: int = flag(
        2,
        "ZeRO stage for deepspeed: from 0 (shards nothing) to 3 (shards everything)",
        group=SYNC_GROUP,
        least=0,
        below=4,
    )
    fabric_strategy: str = flag("ddp", "fabric's strategy: {choices}", group=SYNC_GROUP, choices=("ddp", "fsdp2"))
    pack_gradients: bool = flag(
        False,
        "send gradients in an eighth fewer bits without loss, for sparse_zero1",
        group=SYNC_GROUP,
    )


@dataclass(frozen=True)
class SyncOptions(SyncFlags):
    """All options that a sync's constructor takes: its flags, and options that have no flag.

    first_bucket_mb: capacity in MiB of the first bucket to fill up. It is small, so that the first call starts early
    (torch DDP's default).
    copies_gradients: whether averages are copied back into the gradients that autograd made. A script that keeps such
    a gradient finds it unchanged. The training loop keeps none, and its gradients are views of the buckets.
    broadcast_buffers: whether rank 0's buffers are sent at the start, and by torch's DDP before a step's first forward.
    """

    first_bucket_mb: float = 1.0
    copies_gradients: bool = False
    broadcast_buffers: bool = True


DEFAULTS = SyncOptions()
