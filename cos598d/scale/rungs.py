"""The calls of each rung on any number of hosts: what travels when, in how many steps, and through which link."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cos598d.comm.gloo import reduce_bytes, ring_segments
from cos598d.records.conventions import FLOOR
from cos598d.scale.records import Record, Rung, Tensor
from cos598d.sync.buckets import MIB, plan_buckets
from cos598d.sync.halving_doubling import largest_power_of_two
from cos598d.sync.sparse_rows import LEAST_BYTES

DDP_BUCKET_MB = 25.0
OVERLAPPING = ("overlap", "bucketed", "sparse_rows", "ddp")
# Why a sync is not modelled, for those that cannot be.
LEFT_OUT = {
    "shared_memory": "it is for one host only",
    "local_sgd": "it does not average gradients in every step",
}
# What calls gloo's all-reduce; a codec may travel by other calls, those that are not here.
LIBRARY_RINGS = ("all_reduce", "flat", "overlap", "bucketed", "sparse_rows", "ddp")
RING_CODECS = (None, "bf16", "fp16", "powersgd")
OWN = "it is not a sync of ours, whose calls are known"


@dataclass(frozen=True)
class Call:
    """A collective call among n hosts.

    tensors         it can begin when these have their gradients
    steps           messages that wait for one another
    link_bytes      bytes that pass one direction of the busiest link one after another
    mean_bytes      sent and received by a rank, the mean over the ranks
    busiest_bytes   sent and received by the rank that moves most
    segments        pieces of at most 1 MiB that pass the link two at a time, as in gloo's rings; 0: whole messages
    """

    tensors: tuple[str, ...]
    steps: int
    link_bytes: float
    mean_bytes: float
    busiest_bytes: float
    segments: int = 0

    def shrunk(self, factor: float) -> "Call":
        """The same with `factor` of the bytes."""
        return replace(
            self,
            link_bytes=self.link_bytes * factor,
            mean_bytes=self.mean_bytes * factor,
            busiest_bytes=self.busiest_bytes * factor,
        )


@dataclass(frozen=True)
class Part:
    """Gradients that travel together."""

    names: tuple[str, ...]
    bytes: float


def ring(part: Part, n: int) -> list[Call]:
    """All-reduce in a ring: 2(n-1) steps of one n-th each."""
    moved = 2 * (n - 1) / n * part.bytes
    return [Call(part.names, 2 * (n - 1), moved, 2 * moved, 2 * moved)]


def ring_gather(part: Part, n: int) -> list[Call]:
    """All-gather in a ring: n-1 steps of a rank's whole part."""
    moved = (n - 1) * part.bytes
    return [Call(part.names, n - 1, moved, 2 * moved, 2 * moved)]


def gather_scatter(part: Part, n: int) -> list[Call]:
    """All to rank 0 at once, then from rank 0 to all at once: n-1 payloads through its link each time."""
    moved = (n - 1) * part.bytes
    return [Call(part.names, 1, moved, 2 * moved / n, moved)] * 2


def reduce_broadcast(part: Part, n: int) -> list[Call]:
    """A ring reduce-scatter whose parts go to rank 0, then a binomial tree, whose root sends ceil(log2 n) times."""
    sent, received = reduce_bytes(round(part.bytes), n, 0, True)
    levels, moved = (n - 1).bit_length(), (n - 1) / n * part.bytes
    return [
        Call(part.names, n, received, 2 * moved * (1 + 1 / n), sent + received, (n - 1) * ring_segments(part.bytes, n)),
        Call(part.names, levels, levels * part.bytes, 2 * moved, levels * part.bytes),
    ]


def tree(part: Part, n: int) -> list[Call]:
    """Up a binomial tree and down again, the whole payload on every level."""
    levels = (n - 1).bit_length()
    return [
        Call(part.names, 2 * levels, 2 * levels * part.bytes, 4 * (n - 1) / n * part.bytes, 2 * levels * part.bytes)
    ]


def halving_doubling(part: Part, n: int) -> list[Call]:
    """log2 p halvings and as many doublings among the largest power of two p; folding the others in adds two steps."""
    core = largest_power_of_two(n)
    folded = 2 * part.bytes if core < n else 0.0
    moved = 2 * (core - 1) / core * part.bytes
    steps = 2 * (core.bit_length() - 1) + (2 if folded else 0)
    return [Call(part.names, steps, moved + folded, 4 * (n - 1) / n * part.bytes, 2 * moved + folded)]


ALGORITHMS: dict[str, Callable[[Part, int], list[Call]]] = {
    "gather_scatter": gather_scatter,
    "reduce_broadcast": reduce_broadcast,
    "tree": tree,
    "halving_doubling": halving_doubling,
}


def reason_left_out(rung: Rung) -> str | None:
    """Why the model cannot say what `rung` costs; None where it can."""
    if rung.sync in LEFT_OUT:
        return LEFT_OUT[rung.sync]
    return None if rung.sync in PARTS else OWN


def plan_calls(rung: Rung, record: Record, n: int, batch: int) -> list[Call]:
    """The calls of an iteration of `rung` on `n` hosts, in order; `record` is the one that has measured it.

    `batch`: examples on each host, on which it depends how many rows of an embedding are used. A codec's bytes are
    those of the record, with every bucket made smaller alike.
    """
    if n == 1 or rung.sync == FLOOR:
        return []
    codec = rung.options.get("compress")
    calls = _plan_whole_calls(rung, record, n, batch, codec)
    if record.work["backend"] != "gloo":
        return [replace(call, segments=0) for call in calls]
    if rung.sync in LIBRARY_RINGS and (codec and codec.partition(":")[0]) in RING_CODECS:
        payloads = [call.link_bytes * n / (2 * (n - 1)) for call in calls]
        sizes = zip(calls, payloads, strict=True)
        return [replace(call, segments=2 * (n - 1) * ring_segments(payload, n)) for call, payload in sizes]
    return calls


def _plan_whole_calls(rung: Rung, record: Record, n: int, batch: int, codec: str | None) -> list[Call]:
    algorithm = ALGORITHMS.get(rung.sync, ring)
    parts = PARTS[rung.sync](rung, record, n * batch / (record.ranks * record.batch))
    calls = [call for part in parts for call in algorithm(part, n)]
    if not codec or record.ranks == 1:
        return calls
    if codec.partition(":")[0] == "topk":  # every rank's picks go to every other: more bytes with every host
        calls = [call for part in parts for call in ring_gather(part, n)]
        payload = rung.bytes_sent / (record.ranks - 1)
    else:
        payload = rung.bytes_sent * record.ranks / (2 * (record.ranks - 1))
    if codec == "int8":  # straight to the part's owner, and straight back
        calls = [replace(call, steps=2) for call in calls]
    per_part = max(1, round(rung.calls / len(parts)))  # PowerSGD sends two factors
    factor = payload / sum(part.bytes for part in parts) / per_part
    return [call.shrunk(factor) for call in calls for _ in range(per_part)]


def _each(rung: Rung, record: Record, lookups: float) -> list[Part]:
    return [Part((tensor.name,), tensor.bytes) for tensor in record.tensors]


def _each_reversed(rung: Rung, record: Record, lookups: float) -> list[Part]:
    return _each(rung, record, lookups)[::-1]


def _all(rung: Rung, record: Record, lookups: float) -> list[Part]:
    return _buckets(record.tensors, float("inf"), float("inf"))


def _bucketed(rung: Rung, record: Record, lookups: float) -> list[Part]:
    return _buckets(record.tensors, rung.options["bucket_mb"], rung.options["first_bucket_mb"])


def _sparse_rows(rung: Rung, record: Record, lookups: float) -> list[Part]:
    """`lookups` times as many tokens as in the record look up rows, most of them the same ones again.

    If a share f of the rows is used after some lookups that fall anywhere, then 1 - (1-f)^k is after k times as many.
    """
    large = [t for t in record.tensors if "embedding" in t.name and len(t.shape) == 2 and t.bytes >= LEAST_BYTES]
    dense = [tensor for tensor in record.tensors if tensor not in large]
    parts = _buckets(dense, rung.options["bucket_mb"], rung.options["first_bucket_mb"])
    whole = sum(tensor.bytes for tensor in large)
    if not whole:
        return parts
    measured = (rung.payload_bytes - sum(tensor.bytes for tensor in dense)) / whole
    share = 1 - (1 - min(1.0, max(0.0, measured))) ** lookups
    for tensor in reversed(large):
        # One byte a row says which rows are used; it travels beside backward, and is waited for with the rows.
        parts.append(Part((tensor.name,), tensor.bytes * share + tensor.shape[0]))
    return parts


def _ddp(rung: Rung, record: Record, lookups: float) -> list[Part]:
    """torch's buckets: in the order of arrival, each closed by the tensor that fills it (the first by 1 MiB)."""
    capacity = rung.options["bucket_mb"]
    limit = MIB * (rung.options["first_bucket_mb"] if capacity == DDP_BUCKET_MB else capacity)
    parts: list[Part] = []
    names, size = [], 0
    # Of tensors that arrive together the later in the model comes first.
    ordered = sorted(enumerate(record.tensors), key=lambda pair: (record.compute.arrivals[pair[1].name], -pair[0]))
    for _, tensor in ordered:
        names.append(tensor.name)
        size += tensor.bytes
        if size >= limit:
            parts.append(Part(tuple(names), size))
            names, size, limit = [], 0, capacity * MIB
    return parts + ([Part(tuple(names), size)] if names else [])


def _buckets(tensors: Sequence[Tensor], bucket_mb: float, first_bucket_mb: float) -> list[Part]:
    groups = plan_buckets([(tensor.name, tensor) for tensor in tensors], bucket_mb, first_bucket_mb)
    return [Part(tuple(name for name, _ in group), sum(tensor.bytes for _, tensor in group)) for group in groups]


# What travels together, in the order of the calls; after backward but for those in OVERLAPPING.
PARTS: dict[str, Callable[[Rung, Record, float], list[Part]]] = {
    FLOOR: lambda rung, record, lookups: [],
    "gather_scatter": _each,
    "reduce_broadcast": _each,
    "all_reduce": _each,
    "flat": _all,
    "overlap": _each_reversed,
    "bucketed": _bucketed,
    "ring": _all,
    "halving_doubling": _all,
    "tree": _all,
    "hierarchical": _bucketed,
    "sparse_rows": _sparse_rows,
    "ddp": _ddp,
}
