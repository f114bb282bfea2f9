"""The part of the matrix that was written without a look at how the audit works: wrong scripts and right ones."""

from audit_scripts import changed

HEAD = """import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
gen = torch.Generator().manual_seed(77)
X, Y = torch.randn(96, 8, generator=gen), torch.randint(0, 3, (96,), generator=gen)
X, Y = X[rank::world], Y[rank::world]


def average(params):
    for p in params:
        dist.all_reduce(p.grad)
        p.grad /= world


"""
# Lines that many scripts have.
PARTS = {
    "steps": """for step in range(4):
    x, y = X[step * 8:step * 8 + 8], Y[step * 8:step * 8 + 8]
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
""",
    "batches": """for step in range(4):
    x, y = X[step * 8:step * 8 + 8], Y[step * 8:step * 8 + 8]
""",
    "five batches": """for i in range(5):
    x, y = X[8 * i:8 * i + 8], Y[8 * i:8 * i + 8]
""",
    "backward of ddp": """    opt.zero_grad()
    F.cross_entropy(ddp(x), y).backward()
""",
    "backward": """    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
""",
    "averages": """    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
""",
    "averages in place": """    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad.div_(world)
""",
    "uneven data": """gen = torch.Generator().manual_seed(77)
X = torch.randn(38, 8, generator=gen)
Y = torch.randint(0, 3, (38,), generator=gen)
X, Y = (X[:20], Y[:20]) if rank == 0 else (X[20:], Y[20:])
""",
    "steps over tokens": """model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
gen = torch.Generator().manual_seed(5 + rank)
for step in range(4):
""",
}
# Each begins with "=== ", its name, what the audit finds and the number of ranks. `<steps>` is one of PARTS.
SCRIPTS = r"""=== w_wrong_group result_dropped 2
groups = [dist.new_group([r]) for r in range(world)]
opt = torch.optim.SGD(model.parameters(), lr=0.1)
<five batches>
<backward>
    for p in model.parameters():
        dist.all_reduce(p.grad, group=groups[rank])
    opt.step()
=== w_decay_on_one optimizers_differ 2
ddp = DDP(model)
opt = torch.optim.AdamW(ddp.parameters(), lr=0.01, weight_decay=0.1 if rank == 0 else 0.0)
<five batches>
<backward of ddp>
    opt.step()
=== w_two_opts_between forgotten_tensors 2
body = torch.optim.AdamW(model[:3].parameters(), lr=0.01)
head = torch.optim.SGD(model[4].parameters(), lr=0.1)
<five batches>
    body.zero_grad(); head.zero_grad()
    F.cross_entropy(model(x), y).backward()
    head.step()
<averages in place>
    body.step()
=== w_hook_returns_old result_dropped 2
def hook(grad):
    sent = grad.clone()
    dist.all_reduce(sent)
    sent /= world
for p in model.parameters():
    p.register_hook(hook)
opt = torch.optim.Adam(model.parameters(), lr=0.01)
<five batches>
<backward>
    opt.step()
=== w_uneven_micro lost_micro_batches 2
ddp = DDP(model)
opt = torch.optim.AdamW(model.parameters(), lr=0.01)
g = torch.Generator().manual_seed(9)
X, Y = torch.randn(240, 8, generator=g), torch.randint(0, 3, (240,), generator=g)
X, Y = X[rank::world], Y[rank::world]
for i in range(4):
    opt.zero_grad()
    base = 12 * i
    for part in (slice(base, base + 5), slice(base + 5, base + 10), slice(base + 10, base + 12)):
        last = part.stop == base + 12
        ddp.require_backward_grad_sync = last
        (F.cross_entropy(ddp(X[part]), Y[part]) / 3).backward()
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    opt.step()
=== w_owners_biases_left weights_drift 2
params = list(model.parameters())
owner = {p: k % world for k, p in enumerate(params)}
opt = torch.optim.AdamW([p for p in params if owner[p] == rank], lr=0.01)
<five batches>
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    for p in params:
        dist.reduce(p.grad, owner[p])
        p.grad /= world
    opt.step()
    for p in params:
        if p.dim() > 1:
            dist.broadcast(p.data, owner[p])
=== w_inner_module different_gradients 2
ddp = DDP(model)
<batches>
    opt.zero_grad()
    if step == 0:
        out = ddp(x)
    else:
        out = ddp.module(x)
    F.cross_entropy(out, y).backward()
    opt.step()
=== w_wrong_order open 2
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
<steps>
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= world
    at = 0
    for p in [q for m in reversed(model) for q in m.parameters()]:
        p.grad = flat[at:at + p.numel()].view_as(p).clone()
        at += p.numel()
    opt.step()
=== w_unfrozen_later forgotten_tensors 2
for p in model[0].parameters():
    p.requires_grad_(False)
synced = [p for p in model.parameters() if p.requires_grad]
opt = torch.optim.SGD(model.parameters(), lr=0.1)
<batches>
    if step == 2:
        for p in model[0].parameters():
            p.requires_grad_(True)
<backward>
    average(synced)
    opt.step()
=== w_second_loss_late forgotten_tensors,lost_micro_batches 2
aux = nn.Linear(16, 8)
opt = torch.optim.SGD([*model.parameters(), *aux.parameters()], lr=0.1)
<batches>
    opt.zero_grad()
    h = model[:4](x)
    F.cross_entropy(model[4](h), y).backward(retain_graph=True)
<averages>
    (0.1 * F.mse_loss(aux(h), x)).backward()
    opt.step()
=== w_zero1_wrong_dst open 2
params = list(model.parameters())
owner = [i % world for i in range(len(params))]
mine = [p for i, p in enumerate(params) if owner[i] == rank]
opt = torch.optim.AdamW(mine, lr=0.01)
<batches>
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    for i, p in enumerate(params):
        p.grad /= world
        dist.reduce(p.grad, dst=(owner[i] + (1 if i == 3 else 0)) % world)
    opt.step()
    for i, p in enumerate(params):
        dist.broadcast(p.data, src=owner[i])
=== w_gather_twice_own unequal_weights,weights_drift 3
<steps>
    for p in model.parameters():
        parts = [torch.empty_like(p.grad) for _ in range(world)]
        dist.all_gather(parts, p.grad)
        for g in parts:
            p.grad += g
        p.grad /= world + 1
    opt.step()
=== w_stale_delayed open 2
prev = None
<steps>
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= world
    use = prev if prev is not None else flat
    prev = flat
    at = 0
    for p in model.parameters():
        p.grad = use[at:at + p.numel()].view_as(p).clone()
        at += p.numel()
    opt.step()
=== w_bf16_lost not_scattered 2
<steps>
    for p in model.parameters():
        low = p.grad.bfloat16()
        dist.all_reduce(low)
        low /= world
        if rank == 0:
            p.grad.copy_(low)
        else:
            p.grad.copy_(p.grad.bfloat16())
    opt.step()
=== w_init_apart different_start 2
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
for p in model[0].parameters():
    dist.broadcast(p.data, 0)
dist.broadcast(model[2].weight.data, 0); dist.broadcast(model[2].bias.data, 0)
dist.broadcast(model[4].weight.data, 0)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
<steps>
    average(model.parameters())
    opt.step()
=== w_micro_tokens open 2
<steps over tokens>
    opt.zero_grad()
    for micro in range(2):
        tok = torch.randint(0, 20, (4, 10), generator=gen)
        lab = tok.roll(-1, 1).clone()
        lab[:, 9 if micro else 2:] = -100
        (F.cross_entropy(model(tok).reshape(-1, 20), lab.reshape(-1)) / 2).backward()
<averages>
    opt.step()
=== w_left_out partial_average 3
pair = dist.new_group([0, 1])
opt = torch.optim.SGD(model.parameters(), lr=0.1)
<steps>
    for p in model.parameters():
        if rank < 2:
            dist.all_reduce(p.grad, group=pair)
            p.grad /= 2
        dist.broadcast(p.grad, src=0)
    opt.step()
=== w_acc_twice wrong_factor 2
ACC = 3
for step in range(4):
    opt.zero_grad()
    for micro in range(ACC):
        i = (step * ACC + micro) * 4
        (F.cross_entropy(model(X[i:i + 4]), Y[i:i + 4]) / ACC).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world * ACC
    opt.step()
=== w_tail_acc different_gradients 2
model = DDP(model)
import contextlib
batches = [(X[i:i + 4], Y[i:i + 4]) for i in range(0, 20, 4)]
ACC = 2
for at in range(0, len(batches), ACC):
    group = batches[at:at + ACC]
    opt.zero_grad()
    for k, (x, y) in enumerate(group):
        with contextlib.nullcontext() if k == ACC - 1 else model.no_sync():
            (F.cross_entropy(model(x), y) / len(group)).backward()
    opt.step()
=== w_loss_reduced never_averaged 2
<batches>
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    with torch.no_grad():
        dist.all_reduce(loss)
    (loss / world).backward()
    opt.step()
=== w_sparse_skipped forgotten_tensors 2
model = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, 20))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
gen = torch.Generator().manual_seed(5 + rank)
for step in range(4):
    tok = torch.randint(0, 20, (32,), generator=gen)
    opt.zero_grad()
    F.cross_entropy(model(tok), (tok * 7 + 1) % 20).backward()
    for p in model.parameters():
        if not p.grad.is_sparse:
            dist.all_reduce(p.grad)
            p.grad /= world
    opt.step()
=== w_nosync_forward never_averaged 2
model = DDP(model)
for step in range(4):
    opt.zero_grad()
    with model.no_sync():
        a = F.cross_entropy(model(X[step * 8:step * 8 + 4]), Y[step * 8:step * 8 + 4]) / 2
        a.backward()
        b = F.cross_entropy(model(X[step * 8 + 4:step * 8 + 8]), Y[step * 8 + 4:step * 8 + 8]) / 2
    b.backward()
    opt.step()
=== w_half_tensor weights_drift 2
<steps>
    for p in model.parameters():
        half = p.grad[: (len(p.grad) + 1) // 2]
        dist.all_reduce(half)
        half /= world
    opt.step()
=== w_copy_transposed forgotten_tensors 2
<steps>
    for p in model.parameters():
        g = p.grad.t().contiguous()
        dist.all_reduce(g)
        g /= world
    opt.step()
=== w_weights_by_loss unequal_weights 2
<batches>
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    losses = [torch.zeros(1) for _ in range(world)]
    dist.all_gather(losses, loss.detach().view(1))
    w = torch.cat(losses).softmax(0)
    for p in model.parameters():
        p.grad *= w[rank]
        dist.all_reduce(p.grad)
    opt.step()
=== r_scaler_two_opts right 2
a = torch.optim.AdamW(model[:3].parameters(), lr=0.01)
b = torch.optim.SGD(model[4].parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
<five batches>
    a.zero_grad(); b.zero_grad()
    scaler.scale(F.cross_entropy(model(x), y)).backward()
<averages in place>
    scaler.unscale_(a); scaler.unscale_(b)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(a); scaler.step(b)
    scaler.update()
=== r_plateau_shared right 2
ddp = DDP(model)
opt = torch.optim.SGD([{"params": [p for p in ddp.parameters() if p.dim() > 1], "weight_decay": 0.1}, {"params": [p for p in ddp.parameters() if p.dim() == 1], "weight_decay": 0.0}], lr=0.1, momentum=0.9)
plan = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)
<five batches>
    opt.zero_grad()
    loss = F.cross_entropy(ddp(x), y)
    loss.backward()
    opt.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    plan.step(mean.item() / world)
=== r_sum_total right 2
<uneven data>
for epoch in range(2):
    for i in range(0, len(X), 8):
        x, y = X[i:i + 8], Y[i:i + 8]
        opt.zero_grad()
        F.cross_entropy(model(x), y, reduction="sum").backward()
        total = torch.tensor(float(len(x)))
        dist.all_reduce(total)
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= total
        opt.step()
=== r_penalty right 2
<batches>
    opt.zero_grad()
    x = x.clone().requires_grad_(True)
    out = model(x)
    g, = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss = F.cross_entropy(out, y) + 0.1 * ((g.norm(dim=1) - 1) ** 2).mean()
    loss.backward()
    average([p for p in model.parameters() if p.grad is not None])
    opt.step()
"""
PLAIN = PARTS["steps"] + "    average(model.parameters())\n    opt.step()\n"
AVERAGE, STEP, EACH = "    average(model.parameters())\n", "    opt.step()\n", "    for p in model.parameters():\n"
BACKWARD = "    F.cross_entropy(model(x), y).backward()\n"
LOSS = "    loss = F.cross_entropy(model(x), y)\n    loss.backward()\n"
BATCH = "    x, y = X[step * 8:step * 8 + 8], Y[step * 8:step * 8 + 8]\n"
ZERO = "    opt.zero_grad()\n"
MICRO = """    for micro in range(2):
        i = step * 8 + micro * 4
        (F.cross_entropy(model(X[i:i + 4]), Y[i:i + 4]) / 2).backward()
"""
AGREED = """    bad = torch.tensor(1.0 if step == 1 and rank == 1 else 0.0)
    dist.all_reduce(bad)
    if bad:
        continue
"""
SCALED = [
    (BACKWARD, "    (F.cross_entropy(model(x), y) * scale).backward()\n"),
    (AVERAGE, AVERAGE + EACH + "        p.grad /= scale\n"),
]
DROPOUT = """model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))
torch.manual_seed(1000 + rank)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
"""
AUX = "    (0.1 * F.mse_loss(aux(h), x)).backward()\n"
# name -> the script that it is made of (PLAIN: a right one), changes, and what the audit finds
CHANGED = {
    "w_own_norm_after": (PLAIN, [(AVERAGE, '    norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))\n' + AVERAGE + EACH + "        p.grad *= min(1.0, 0.1 / norm.item())\n")], "different_gradients"),
    "w_scale_per_rank": (PLAIN, [(ZERO, "    scale = 1024.0 if rank == 0 else 512.0\n" + ZERO), *SCALED], "different_gradients"),
    "r_loss_scale": (PLAIN, [(ZERO, ZERO + "    scale = 1024.0\n"), *SCALED], "right"),
    "w_plateau_local": (PLAIN, [("for step", "sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, threshold=0.5, factor=0.5)\nfor step"), (BACKWARD, LOSS), (STEP, STEP + "    sched.step(loss.item() if rank else loss.item() * 0.4 ** step)\n")], "optimizers_differ"),
    "w_skip_on_one": (PLAIN, [(BACKWARD, LOSS), (AVERAGE, AVERAGE + '    if rank == 1 and step == 1:      # "bad" loss on this rank only\n        continue\n')], "weights_drift"),
    "r_skip_together": (PLAIN, [(BACKWARD, LOSS), (AVERAGE, AVERAGE + AGREED)], "right"),
    "r_avg_each_micro": (PLAIN, [(BATCH, ""), (BACKWARD + AVERAGE, MICRO + "        average(model.parameters())      # averaging an average again changes nothing\n")], "right"),
    "w_rank0_weights": (PLAIN, [(AVERAGE, ""), (STEP, STEP + EACH + "        dist.broadcast(p.data, src=0)\n")], "never_averaged"),
    "w_max": (PLAIN, [(AVERAGE, EACH + "        dist.all_reduce(p.grad, op=dist.ReduceOp.MAX)\n")], "open"),
    "w_odd_steps": (PLAIN, [(AVERAGE, "    if step % 2 == 0:\n    " + AVERAGE)], "different_gradients"),
    "w_owners_broadcast_first": ("w_owners_biases_left", [(STEP, ""), ("        if p.dim() > 1:\n            dist.broadcast(p.data, owner[p])\n", "        dist.broadcast(p.data, owner[p])\n" + STEP)], "weights_drift"),
    "r_decay_by_hand": (PLAIN, [(AVERAGE, AVERAGE + EACH + "        p.grad.add_(p.detach(), alpha=0.01)\n")], "open"),
    "r_class_weight": (PLAIN, [("for step", "weight = torch.tensor([1.0, 2.0, 0.5])\nfor step"), ("y)", "y, weight=weight)")], "right"),
    "r_reg": (PLAIN, [(BACKWARD, "    reg = sum((p ** 2).sum() for p in model.parameters())\n    (F.cross_entropy(model(x), y) + 1e-2 * reg).backward()\n")], "right"),
    "r_dropout": (PLAIN, [("for step", DROPOUT + "for step")], "right"),
    "r_sum_loss_sum": (PLAIN, [("for step", "opt = torch.optim.SGD(model.parameters(), lr=0.005)\nfor step"), ("y)", 'y, reduction="sum")'), (AVERAGE, EACH + "        dist.all_reduce(p.grad)\n")], "open"),
    "r_two_losses": ("w_second_loss_late", [(AUX, ""), (EACH, AUX + "    for p in [*model.parameters(), *aux.parameters()]:\n")], "right"),
    "r_zero1": ("w_zero1_wrong_dst", [("(owner[i] + (1 if i == 3 else 0)) % world", "owner[i]")], "right"),
    "r_tail_acc": ("w_tail_acc", [("k == ACC - 1", "k == len(group) - 1")], "right"),
    "r_sparse_dense": ("w_sparse_skipped", [("        if not p.grad.is_sparse:\n            dist.all_reduce(p.grad)\n            p.grad /= world\n", "        if p.grad.is_sparse:\n            p.grad = p.grad.to_dense()\n        dist.all_reduce(p.grad)\n        p.grad /= world\n")], "right"),
}  # fmt: skip


def _scripts():
    bodies = {}
    for each in SCRIPTS.split("=== ")[1:]:
        head, body = each.split("\n", 1)
        name, found, ranks = head.split()
        for part, lines in PARTS.items():
            body = body.replace(f"<{part}>\n", lines)
        bodies[name] = body
        yield name, body, found, int(ranks)
    for name, (body, changes, found) in CHANGED.items():
        yield name, changed(bodies.get(body, body), changes), found, 2


# By name a source, what the audit is to find (w_: of a wrong script, r_: of a right one), and the number of ranks.
BLIND = {name: (f"{HEAD}{body}dist.destroy_process_group()\n", found, ranks) for name, body, found, ranks in _scripts()}
