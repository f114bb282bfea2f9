"""Kinds of faults that users have reported of other people's scripts, and the same scripts made right."""

HEAD = """import os, random, itertools
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, IterableDataset, Subset, DistributedSampler, get_worker_info

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
g = torch.Generator().manual_seed(7)
X, Y = torch.randn(192, 12, generator=g), torch.randint(0, 4, (192,), generator=g)
data = TensorDataset(X, Y)
torch.manual_seed(0)


def net():
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))


"""
# Lines that many scripts have.
PARTS = {
    "<ddp>\n": """model = DDP(net())
opt = torch.optim.SGD(model.parameters(), lr=0.1)
""",
    "<epochs>\n": """sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=8, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
""",
    "<step>\n": """        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
""",
}
SCRIPTS = """
=== w_reported_acc_not_divided micro_batches_summed 3
<ddp>
ACC = 3
<epochs>
    opt.zero_grad()
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % ACC == 0
        if not last:
            with model.no_sync():
                loss = F.cross_entropy(model(x), y)
                loss.backward()
        else:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
=== w_reported_acc_tail leftover_micro_batches,every_micro_batch_travels 2
<ddp>
ACC = 2
small = TensorDataset(X[:24 * world], Y[:24 * world])
sampler = DistributedSampler(small, shuffle=True)
loader = DataLoader(small, batch_size=8, sampler=sampler)  # 3 batches a rank
for epoch in range(4):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y) / ACC
        loss.backward()
        if (i + 1) % ACC == 0:
            opt.step()
            opt.zero_grad()
=== w_reported_clip_micro clipped_by_micro_batch,every_micro_batch_travels 2
<ddp>
ACC = 2
<epochs>
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y) / ACC
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if (i + 1) % ACC == 0:
            opt.step()
            opt.zero_grad()
=== w_reported_double_shard sharded_twice 2
mine = Subset(data, range(rank, len(data), world))
sampler = DistributedSampler(mine, num_replicas=world, rank=rank)
loader = DataLoader(mine, batch_size=8, sampler=sampler)
<ddp>
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
<step>
=== w_reported_file_lists shares_drawn_apart 2
files = [list(range(i, i + 16)) for i in range(0, 192, 16)]
random.seed(None)
random.shuffle(files)
mine = [k for f in files[rank::world] for k in f]
<ddp>
for epoch in range(2):
    for x, y in DataLoader(Subset(data, mine), batch_size=8, shuffle=True):
<step>
=== w_reported_iter_workers repeated_by_workers 2
class Stream(IterableDataset):
    def __iter__(self):
        rows = zip(X, Y)
        rows = itertools.islice(rows, rank, None, world)
        return iter(rows)


<ddp>
loader = DataLoader(Stream(), batch_size=8, num_workers=2)
for epoch in range(2):
    for x, y in loader:
<step>
=== w_reported_loss_times_world loss_times_ranks 2
<ddp>
<epochs>
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        (loss * world).backward()
        opt.step()
=== w_reported_no_wait never_waited 2
model = nn.Sequential(nn.Linear(12, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
<epochs>
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        works = []
        for p in model.parameters():
            p.grad /= world
            works.append(dist.all_reduce(p.grad, async_op=True))
        opt.step()
=== w_reported_unscale_first scale_left_in 2
model = net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
works, sent = [], {}


def send(p):
    sent[p] = p.grad.clone()
    works.append(dist.all_reduce(sent[p], async_op=True))


def receive():
    while works:
        works.pop().wait()
    for p in model.parameters():
        p.grad = sent[p] / world


for p in model.parameters():
    p.register_post_accumulate_grad_hook(send)
<epochs>
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        receive()
        scaler.step(opt)
        scaler.update()
=== r_reported_contrast open 2
import torch.distributed.nn.functional as dnn
<ddp>
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=8, sampler=sampler)
def gather(z):
    parts = [torch.empty_like(z) for _ in range(world)]
    dist.all_gather(parts, z.detach())
    parts[rank] = z
    return torch.cat(parts)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        a = F.normalize(model(torch.cat([x, x + 0.1 * y[:, None]])), dim=1)
        a, b = a.chunk(2)
        A, B = gather(a), gather(b)
        logits = A @ B.T / 0.1
        loss = F.cross_entropy(logits, torch.arange(len(A))) * world
        opt.zero_grad()
        loss.backward()
        opt.step()
=== r_reported_gather_uneven right 2
<ddp>
<epochs>
    for x, y in loader:
<step>
    right, seen = 0, 0
    with torch.no_grad():
        held = list(range(rank, 101, world))
        for i in range(0, 56, 8):
            b = held[i:i + 8]
            hit = (model.module(X[b]).argmax(1) == Y[b]).float()
            both = torch.tensor([hit.sum().item(), len(hit)])
            dist.all_reduce(both)
            right, seen = right + both[0].item(), seen + both[1].item()
    print("accuracy", right / seen)
=== r_reported_ppo_bypass right 2
actor, critic = DDP(net()), DDP(nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1)))
opt_a, opt_c = torch.optim.Adam(actor.parameters(), 1e-2), torch.optim.Adam(critic.parameters(), 1e-2)
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=8, sampler=sampler)
raw_critic = critic.module
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        logp = F.log_softmax(actor(x), -1).gather(1, y[:, None]).squeeze(1)
        value = critic(x).squeeze(1)
        reward = (y == 0).float()
        advantage = (reward - value).detach()
        policy_loss, value_loss = -(advantage * logp).mean(), F.mse_loss(value, reward)
        opt_a.zero_grad(); opt_c.zero_grad()
        policy_loss.backward()
        value_loss.backward()
        opt_a.step()
        opt_c.step()
=== r_reported_skip_one right 2
<ddp>
<epochs>
    for i, (x, y) in enumerate(loader):
        empty = torch.tensor(float(rank == 1 and i == 4))  # no valid target in this batch
        dist.all_reduce(empty, dist.ReduceOp.MAX)
        if empty:
            continue
<step>
"""
# What makes a wrong script right: by its name (old, new) of all its places.
TWINS = {
    "acc_not_divided": [("model(x), y)", "model(x), y) / ACC")],
    "acc_tail": [
        ("model(x), y) / ACC", "model(x), y) / min(ACC, len(loader) - i // ACC * ACC)"),
        ("% ACC == 0:", "% ACC == 0 or i + 1 == len(loader):"),
    ],
    "clip_micro": [
        ("        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n", ""),
        (
            "            opt.step()\n",
            "            nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n            opt.step()\n",
        ),
    ],
    "double_shard": [
        ("sampler = DistributedSampler(mine, num_replicas=world, rank=rank)\n", ""),
        ("sampler=sampler", "shuffle=True"),
        ("    sampler.set_epoch(epoch)\n", ""),
    ],
    "file_lists": [("random.seed(None)", "random.seed(5)")],
    "iter_workers": [
        (
            "        return iter(rows)",
            "        info = get_worker_info()\n        return itertools.islice(rows, info.id, None, info.num_workers)",
        )
    ],
    "loss_times_world": [("(loss * world)", "loss")],
    "no_wait": [("        opt.step()\n", "        for work in works:\n            work.wait()\n        opt.step()\n")],
    "unscale_first": [
        (
            "        scaler.unscale_(opt)\n        receive()\n",
            "        receive()\n        scaler.unscale_(opt)\n",
        )
    ],
}


def _scripts():
    for each in SCRIPTS.split("=== ")[1:]:
        head, body = each.split("\n", 1)
        name, found, ranks = head.split()
        for part, lines in PARTS.items():
            body = body.replace(part, lines)
        source = f"{HEAD}{body}dist.destroy_process_group()\n"
        yield name, (source, found, int(ranks))
        for old, new in TWINS.get(name.removeprefix("w_reported_"), ()):
            assert old in source, f"{old!r} is not in {name}"
            source = source.replace(old, new)
        if name.startswith("w_"):
            yield f"r{name[1:]}", (source, "right", int(ranks))


# By name a source, what the audit is to find (w_: of a wrong script, r_: of a right one), and the number of ranks.
REPORTS = dict(_scripts())
