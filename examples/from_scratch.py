"""Data-parallel training from scratch, with nothing but torch. Pick one of three ways to average the gradients:

    torchrun --nproc_per_node 4 examples/from_scratch.py --sync gather_scatter
    torchrun --nproc_per_node 4 examples/from_scratch.py --sync all_reduce
    torchrun --nproc_per_node 4 examples/from_scratch.py --sync bucketed

The losses are the same for every sync and every number of ranks. Read `train` first, then the three syncs.
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group opens: it would keep an open one, whose threads can abort the exit
from torch import nn


class GatherScatter:
    """Rank 0 gathers each gradient from all ranks, averages it, and scatters the average."""

    def __init__(self, model):
        self.parameters = list(model.parameters())

    def finish(self):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for p in self.parameters:
            gathered = [torch.empty_like(p.grad) for _ in range(ranks)] if rank == 0 else None
            dist.gather(p.grad, gathered, dst=0)
            averages = [torch.stack(gathered).mean(dim=0)] * ranks if rank == 0 else None
            dist.scatter(p.grad, averages, src=0)


class AllReduce:
    """All ranks sum each gradient with one all-reduce, then divide by the number of ranks."""

    def __init__(self, model):
        self.parameters = list(model.parameters())

    def finish(self):
        for p in self.parameters:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


class Bucketed:
    """Gradients are sent in buckets, and the first buckets are sent while backward still computes the others.

    Backward computes the last layers first, so buckets are filled in reverse order. A bucket starts when it is full and
    all buckets before it have started. So every rank makes the same calls in the same order.
    """

    def __init__(self, model, bucket_bytes=64 * 1024):
        self.buckets = [[]]
        for p in reversed(list(model.parameters())):
            if self.buckets[-1] and sum(q.nbytes for q in self.buckets[-1]) + p.nbytes > bucket_bytes:
                self.buckets.append([])
            self.buckets[-1].append(p)
        self.begin_step()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.ready)

    def begin_step(self):
        self.missing = [set(bucket) for bucket in self.buckets]
        self.calls = []  # (the bucket's gradients in one tensor, its all-reduce), in order

    def ready(self, parameter):
        for missing in self.missing:
            missing.discard(parameter)
        while len(self.calls) < len(self.buckets) and not self.missing[len(self.calls)]:
            flat = torch.cat([p.grad.flatten() for p in self.buckets[len(self.calls)]])
            self.calls.append((flat, dist.all_reduce(flat, async_op=True)))

    def finish(self):
        for bucket, (flat, call) in zip(self.buckets, self.calls, strict=True):
            call.wait()
            averages = (flat / dist.get_world_size()).split([p.numel() for p in bucket])
            for p, average in zip(bucket, averages, strict=True):
                p.grad.copy_(average.view_as(p))
        self.begin_step()


SYNCS = {"gather_scatter": GatherScatter, "all_reduce": AllReduce, "bucketed": Bucketed}


class Classifier(nn.Module):
    """BERT with a classifier on its first token: (batch, tokens) of ids, mask and segments -> (batch, labels)."""

    def __init__(self, vocabulary, width=64, layers=2, heads=2, inner=128, longest=512, labels=2):
        super().__init__()
        self.word, self.position = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.segment, self.norm = nn.Embedding(2, width), nn.LayerNorm(width, eps=1e-12)
        layer = nn.TransformerEncoderLayer(width, heads, inner, 0.0, "gelu", layer_norm_eps=1e-12, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.pooler, self.classifier = nn.Linear(width, width), nn.Linear(width, labels)

    def forward(self, ids, mask, segments):
        places = torch.arange(ids.shape[1])
        hidden = self.norm(self.word(ids) + self.position(places) + self.segment(segments))
        hidden = self.encoder(hidden, src_key_padding_mask=mask == 0)
        return self.classifier(torch.tanh(self.pooler(hidden[:, 0])))


def train(model, sync, batches, learning_rate, max_grad_norm=1.0):
    """Take one step of SGD per global batch (ids, mask, segments, labels); return the global batches' mean losses."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)  # the replicas must start alike
    sync = SYNCS[sync](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    losses = []
    for batch in batches:
        ids, mask, segments, labels = (tensor[rank::ranks] for tensor in batch)  # this rank's share
        loss_sum = nn.functional.cross_entropy(model(ids, mask, segments), labels, reduction="sum")
        # The average over ranks divides by n, and shares may differ in size. So this is the global mean's gradient.
        (loss_sum * ranks / len(batch[0])).backward()
        sync.finish()  # now every rank has the gradient of the global batch
        nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)  # after the average, never before it
        optimizer.step()
        optimizer.zero_grad()
        total = loss_sum.detach()
        dist.all_reduce(total)
        losses.append(total.item() / len(batch[0]))
    return losses


def made_up_batches(steps, size=64, tokens=16, vocabulary=32):
    """Random tokens; the label is whether token 1 is among them. Every rank draws the same."""
    for _ in range(steps):
        ids = torch.randint(2, vocabulary, (size, tokens))
        labels = torch.randint(0, 2, (size,))
        ids[labels == 1, 5] = 1
        yield ids, torch.ones_like(ids), torch.zeros_like(ids), labels


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sync", choices=SYNCS, default="bucketed")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    losses = train(Classifier(32), options.sync, made_up_batches(options.steps), learning_rate=0.5)
    if dist.get_rank() == 0:
        print(*(f"step {step}: loss {loss:.6f}" for step, loss in enumerate(losses, 1)), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
