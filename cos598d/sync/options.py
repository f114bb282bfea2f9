"""The options of a gradient sync: its flags on the command line, and what only the program sets."""

from dataclasses import dataclass

from cos598d.fields import flag

SYNC_GROUP = "gradient sync"  # where --help lists the flags below


@dataclass(frozen=True)
class SyncFlags:
    """The flags of a sync. One that does not name a flag among those it `uses` refuses it.

    bucket_mb: capacity of a bucket in MiB (torch DDP's figure).
    compress: the codec in which buckets travel (`cos598d/sync/codecs`); None: as they are.
    sync_every: the steps from one average to the next, for syncs that average weights.
    fragments: in how many parts weights are averaged, one after the other, where they are averaged in parts.
    outer_learning_rate, outer_momentum: of the step along such an average.
    bucket_view: whether torch's DDP lets gradients be views of its buckets, so that none is copied back.
    ddp_hook: the communication hook of torch's DDP; None: its own all-reduce.
    reshard: "yes" frees gathered parameters after their layer's forward and gathers them again for backward.
    reduce_scatter: whose sums gradients by shards: "ours", by messages, or "torch", the backend's.
    zero_stage: what DeepSpeed cuts over the ranks: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 weights too.
    fabric_strategy: what Lightning Fabric trains with.
    pack_gradients: whether gradients travel in fewer bits, and arrive to the last one.
    """

    bucket_mb: float = flag(25.0, "capacity of a bucket in MiB, for syncs with buckets", group=SYNC_GROUP, above=0)
    compress: str | None = None  # a flag in RunConfig, which knows the codecs' names
    sync_every: int = flag(
        1, "steps from one average of the weights to the next, for local_sgd and diloco", group=SYNC_GROUP, least=1
    )
    fragments: int = flag(
        16, "parts of the weights, of which diloco averages one at a time", group=SYNC_GROUP, least=1, below=10_000
    )
    outer_learning_rate: float = flag(
        0.7, "step along an average of what the ranks moved, for diloco", group=SYNC_GROUP, above=0
    )
    outer_momentum: float = flag(
        0.9, "Nesterov's momentum of these steps, for diloco", group=SYNC_GROUP, least=0, below=1
    )
    bucket_view: bool = flag(
        False, "gradients are views of the buckets, for ddp: torch's gradient_as_bucket_view", group=SYNC_GROUP
    )
    ddp_hook: str | None = flag(
        None,
        "communication hook of torch's DDP, for ddp: one of {choices}",
        group=SYNC_GROUP,
        choices=("fp16", "powersgd", "post_localsgd"),
    )
    reshard: str = flag(
        "yes",
        "whether gathered weights are freed after their layer's forward, for torch_fsdp and fabric: {choices}",
        group=SYNC_GROUP,
        choices=("yes", "no"),
    )
    reduce_scatter: str = flag(
        "ours",
        "whose reduce-scatter sums gradients, for torch_fsdp: {choices}",
        group=SYNC_GROUP,
        choices=("ours", "torch"),
    )
    zero_stage: int = flag(
        2, "ZeRO's stage for deepspeed: 0 cuts nothing, 3 everything", group=SYNC_GROUP, least=0, below=4
    )
    fabric_strategy: str = flag("ddp", "what fabric trains with: {choices}", group=SYNC_GROUP, choices=("ddp", "fsdp2"))
    pack_gradients: bool = flag(
        False,
        "gradients travel in an eighth fewer bits, and arrive to the last bit, for sparse_zero1",
        group=SYNC_GROUP,
    )


@dataclass(frozen=True)
class SyncOptions(SyncFlags):
    """What a sync is made with: its flags, each of use to some kinds, and what no flag says.

    first_bucket_mb: capacity in MiB of the first bucket to be full, which is small so that the first call starts early
    (torch DDP's figure).
    copies_gradients: whether averages are copied back into the gradients that autograd made, so that one that a script
    keeps stays as it is. The training loop keeps none, and its gradients are views of the buckets.
    broadcast_buffers: whether rank 0's buffers are sent at the start, and by torch's DDP before a step's first forward.
    """

    first_bucket_mb: float = 1.0
    copies_gradients: bool = False
    broadcast_buffers: bool = True


DEFAULTS = SyncOptions()
