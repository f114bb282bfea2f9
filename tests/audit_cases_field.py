"""The part of the matrix from other people's scripts: faults that the audit once missed, and right scripts that look alike.

FIELD has by name a source, what the audit is to find, and the number of ranks. What it finds is a fault's name; RIGHT
for "No fault found"; OPEN for no accusation and no certificate, DOUBTFUL for the same of a script that is mostly wrong;
or UNACCUSED for no accusation.
"""

from textwrap import indent

from audit_cases import AVERAGE, CLIP, DDP_SAMPLER, DDP_STEPS, LOSS, MODEL, SET_EPOCH, SHARE, STEP
from audit_scripts import HEAD, IMPORTS, JOIN, with_changes

RIGHT, OPEN, DOUBTFUL, UNACCUSED = "right", "open", "doubtful", "unaccused"
SUM_AND_MEAN = "        dist.all_reduce(p.grad)\n        p.grad /= ranks\n"
FIELD: dict[str, tuple[str, str, int]] = {}


def add(found, ranks=2, **sources):
    """Put sources of the same finding into FIELD by their names; for several numbers of ranks, once for each."""
    for name, source in sources.items():
        if isinstance(ranks, int):
            FIELD[name] = source, found, ranks
        else:
            FIELD.update({f"{name}_{each}": (source, found, each) for each in ranks})


def by_hand(*changes):
    """The script by hand, with batches that 2 and 3 ranks share evenly."""
    source = with_changes("by_hand", changes)
    return source.replace("16 * step, 16 * step + 16", "24 * step, 24 * step + 24")


def averaged(text, clip=CLIP):
    """The same with `text` in place of the all-reduce and the division of one gradient."""
    return by_hand((SUM_AND_MEAN, text), *([] if clip else [(CLIP, "")]))


# One rank's gradient for all.
BROADCAST = "        dist.broadcast(p.grad, 0)  # here\n"
RING = """        send, recv = p.grad.clone(), p.grad.clone()
        total = {total}
        for turn in range(ranks - 1):
            out, into = (send, recv) if turn % 2 == 0 else (recv, send)
            work = dist.isend(out, (rank + 1) % ranks)
            dist.recv(into, (rank - 1) % ranks)
            total += into
            work.wait()
        p.grad.copy_(total / ranks)
"""
GATHER = """        parts = [torch.empty_like(p.grad) for _ in range(ranks)] if rank == 0 else None
        dist.gather(p.grad, parts)
        if rank == 0:
            p.grad = {mean}
        dist.broadcast(p.grad, 0)
"""
HOOKS = """handles = []


def send(p):
    p.grad /= ranks
    handles.append(dist.all_reduce(p.grad, async_op=True))


for p in model.parameters():
    p.register_post_accumulate_grad_hook(send)
optimizer = torch"""
MICRO = """    for part in batch.split(4):
        loss = nn.functional.cross_entropy(model(data[part]), labels[part]) / (len(batch) / 4)
        loss.backward()
"""
WITHOUT_DATA = """    if rank:
        loss = nn.functional.cross_entropy(model(data[batch]), labels[batch])
        loss.backward()
    else:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
"""
OTHERS = "[rank - 1 :: ranks - 1] if rank else []"
SOME = "        if p.dim() > 1:\n    " + SUM_AND_MEAN.replace("\n", "\n    ", 1) + "        else:\n    " + BROADCAST
CLIP_FIRST = CLIP + "    for p in model.parameters():\n" + BROADCAST
add(
    "partial_average",
    (2, 3),
    broadcast=averaged(BROADCAST),
    broadcast_by_another=averaged(BROADCAST.replace("0)", "1)"), ""),
    broadcast_clipped_first=by_hand((AVERAGE + CLIP, CLIP_FIRST)),
    broadcast_some=averaged(SOME),
    broadcast_micro=by_hand((SUM_AND_MEAN, BROADCAST), (LOSS, MICRO)),
    ring_with_one_buffer=averaged(RING.format(total="recv"), ""),
    root_takes_its_own=averaged(GATHER.format(mean="parts[0]")),
)
add(
    RIGHT,
    (2, 3),
    ring=averaged(RING.format(total="p.grad.clone()")),
    root_averages=averaged(GATHER.format(mean="torch.stack(parts).mean(0)")),
    broadcast_of_the_average=averaged(SUM_AND_MEAN + BROADCAST),
    handles=by_hand((AVERAGE, "    while handles:\n        handles.pop().wait()\n"), ("optimizer = torch", HOOKS)),
    zeros_of_one_rank=by_hand(("labels[batch])\n", "labels[batch]) * (ranks / (ranks - 1) if rank else 0.0)\n")),
)
# Means over unequal numbers of tokens, and a short batch.
TOKENS = """    wanted = torch.where(torch.arange(len(batch)) < 2 + 5 * rank, labels[batch], -100)
    kept = (wanted != -100).sum()
    total = kept.clone()
    dist.all_reduce(total)
    outputs = model(data[batch])
    {loss}.backward()
"""
MEAN, SUMMED = (f"nn.functional.cross_entropy(outputs, wanted{how})" for how in ("", ', reduction="sum"'))
EACH = 'nn.functional.cross_entropy(outputs, labels[batch], reduction="none")'
for name, text, found in (
    ("mean", MEAN, DOUBTFUL),
    ("mean_of_picked", EACH + "[wanted >= 0].mean()", DOUBTFUL),
    ("sum_over_its_own", f"({SUMMED} / kept)", DOUBTFUL),
    ("masked_over_its_own", f"(({EACH} * (wanted >= 0).float()).sum() / kept)", DOUBTFUL),
    ("mean_by_share", f"({MEAN} * kept * ranks / total)", RIGHT),
    ("sum_over_all", f"({SUMMED} * ranks / total)", RIGHT),
    ("masked_over_all", f"(({EACH} * (wanted >= 0).float()).sum() * ranks / total)", RIGHT),
):
    add(found, **{f"tokens_{name}": by_hand((LOSS, TOKENS.format(loss=text)))})
TIED = [
    (
        MODEL,
        "nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))\nmodel[2].weight = model[0].weight",
    ),
    ("optimizer = torch", "listed = [p for layer in model for p in layer.parameters()]\noptimizer = torch"),
]
IN_TWO_LOOPS = """    for p in listed:
        p.grad /= ranks
    for p in model.parameters():
        dist.all_reduce(p.grad)
"""
SCALER = [
    ("for step in", "scaler = torch.amp.GradScaler('cpu', init_scale=256.0)\nfor step in"),
    ("    loss.backward()", "    scaler.scale(loss).backward()"),
    (CLIP, "    if step == 1 and rank:\n        model[0].bias.grad[0] = float('inf')\n"),
    (STEP, "    scaler.step(optimizer)  # here\n    scaler.update()\n"),
]
# On 2 ranks half a loss says nothing: see `loss_divided_and_averaged`.
OF_THREE = ("labels[batch])\n", "labels[batch]) / ranks\n")
add("averaged_twice", 3, loss_divided_and_averaged_on_3=by_hand(OF_THREE))
add(RIGHT, tied_averaged_twice=by_hand(*TIED, (AVERAGE, AVERAGE.replace("model.parameters()", "listed"))))
add(DOUBTFUL, tied_divided_twice=by_hand(*TIED, (AVERAGE, IN_TWO_LOOPS), (CLIP, "")))
add("different_gradients", a_scaler_that_leaves_out_a_step_on_one_rank=by_hand(*SCALER))
SHORT = ("16 * step + 16)", "16 * step + (16 if step < 2 else 8))")
NOMINAL = LOSS.replace("labels[batch])", 'labels[batch], reduction="sum") / {}')
add(DOUBTFUL, short_batch_by_the_nominal_size=by_hand(SHORT, (LOSS, NOMINAL.format("8"))))
add(RIGHT, short_batch_by_its_size=by_hand(SHORT, (LOSS, NOMINAL.format("len(batch)"))))
NO_BACKWARD = by_hand((LOSS, WITHOUT_DATA), (SHARE, OTHERS), ("p.grad /= ranks", "p.grad /= ranks - 1"))
add(OPEN, 3, no_backward_on_one_rank=NO_BACKWARD)
LOOP = "    for inputs, targets in loader:\n" + DDP_STEPS
JOINED = [
    (DDP_SAMPLER, "mine = torch.utils.data.Subset(dataset, range(32) if rank else range(32, 48))\n"),
    (SET_EPOCH, ""),
    ("DataLoader(dataset, batch_size=8, sampler=sampler)", "DataLoader(mine, batch_size=8)"),
    (LOOP, "    with model.join():\n" + indent(LOOP, "    ")),
]
add(UNACCUSED, joined=with_changes("ddp", JOINED))

# Tensors of one element.
REGRESSION = (
    HEAD
    + """data = torch.randn(144, {inputs})
labels = 3 * data.sum(1, keepdim=True) + 1 + torch.randn(144, 1)
model = {model}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(5):
    batch = torch.arange(24 * step, 24 * step + 24)[rank::ranks]
    optimizer.zero_grad()
    nn.functional.mse_loss(model(data[batch]), labels[batch]).backward()
{rest}    optimizer.step()
dist.destroy_process_group()
"""
)
MODELS = {
    "net": (8, "nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))"),
    "line": (1, "nn.Linear(1, 1)"),
    "number": (1, "nn.Linear(1, 1, bias=False)"),
    "plane": (8, "nn.Linear(8, 1)"),
}
SUM = "    for p in model.parameters():\n        dist.all_reduce(p.grad)\n"
FORGOTTEN = AVERAGE.replace(
    SUM_AND_MEAN, "        if p.numel() > 1:\n            dist.all_reduce(p.grad)\n            p.grad /= ranks\n"
)
ONE_FOR_ALL = "    for p in model.parameters():\n" + BROADCAST
for shape, (inputs, model) in MODELS.items():
    ranks = 3 if shape in ("net", "number") else 2
    for manner, rest, found in (
        ("right", AVERAGE, RIGHT),
        ("clipped", AVERAGE + CLIP, OPEN if shape == "number" else RIGHT),
        ("summed", SUM, "summed"),
        ("alone", "", "never_averaged"),
        ("broadcast", ONE_FOR_ALL, "partial_average"),
        *([("forgotten", FORGOTTEN + CLIP, "forgotten_tensors")] if shape in ("net", "plane") else []),
    ):
        add(found, ranks, **{f"{shape}_{manner}": REGRESSION.format(inputs=inputs, model=model, rest=rest)})

# Gradients that are 0, and nothing to judge.
ONE_CLASS = (MODEL, "nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))")
ENTROPY = "nn.functional.cross_entropy(model(data[batch]), labels[batch])"


def with_loss(loss, *changes, mark=""):
    """The script by hand with another loss."""
    return by_hand((ENTROPY, loss), ("    loss.backward()", f"    loss.backward(){mark}"), *changes)


HERE = "  # here"
add("zero_gradients", one_class=with_loss(ENTROPY.replace("labels[batch]", "labels[batch] * 0"), ONE_CLASS, mark=HERE))
add("zero_gradients", 3, times_zero=with_loss(f"{ENTROPY} * 0", mark=HERE))
add(
    RIGHT,
    zeros_in_the_first_step=with_loss(f"{ENTROPY} * (1.0 if step else 0.0)"),
    dead_units=by_hand((LOSS, "    if step == 0:\n        model[0].bias.data -= 100\n" + LOSS)),
)
NO_TRAINING = """import torch
import torch.distributed as dist

dist.init_process_group('gloo')
dist.all_reduce(torch.ones(3))
dist.destroy_process_group()
"""
add(
    OPEN,
    hinge_that_is_met_at_first=with_loss("torch.relu(model(data[batch]).square().mean() - (9 if step < 3 else 0))"),
    no_training=NO_TRAINING,
    steps_by_hand=by_hand((STEP, "    for p in model.parameters():\n        p.data -= 0.1 * p.grad\n")),
)

# Checkpoints.
KEEP = "    torch.save(model.state_dict(), '{}')  # here\n"
ON_ONE = "    if rank == 0:\n    " + KEEP.format("model.pt") + "    dist.barrier()\n"
IN_TURN = """    for turn in range(ranks):
        if turn == rank:
            torch.save(model.state_dict(), 'model.pt')
        dist.barrier()
"""
IN_MEMORY = "    import io\n\n    torch.save(model.state_dict(), io.BytesIO())\n"
OWN_NAME = "    torch.save(model.state_dict(), f'model-{rank}.pt')\n"
LAST = "    if step == 4:\n    "
for name, text, found in (
    ("all", KEEP.format("model.pt"), "saved_at_once"),
    ("one", ON_ONE, RIGHT),
    ("in_turn", IN_TURN, RIGHT),
    ("in_memory", IN_MEMORY, RIGHT),
    ("own_name", OWN_NAME, RIGHT),
):
    inside = LAST + text.replace("\n    ", "\n        ")
    add(found, **{f"saved_by_{name}": by_hand((STEP, STEP + inside))})

# Ranks that split the data for themselves.
SPLIT = (
    IMPORTS
    + """from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler
"""
    + JOIN
    + """count = {count}
dataset = TensorDataset(torch.randn(count, 8), torch.randint(0, 3, (count,)))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
torch.manual_seed(100 + rank)
model = DistributedDataParallel(model)
{split}
sampler = DistributedSampler(train, shuffle=True)
loader = DataLoader({loader})
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:  # here
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
{evaluation}dist.destroy_process_group()
"""
)
EVALUATION = """    model.eval()
    with torch.no_grad():
        for inputs, targets in DataLoader({loader}, batch_size=8):{mark}
            model.module(inputs)
    model.train()
"""
UNSEEDED = "train, held = random_split(dataset, [0.8, 0.2])"
SEEDED = UNSEEDED.replace("])", "], generator=torch.Generator().manual_seed(0))")
TWICE = "dataset = TensorDataset(*(torch.cat([each[:{0}], each[:{1}]]) for each in dataset.tensors))\n"
MINE = """mine = [*DistributedSampler(dataset, shuffle=False)]
train, held = dataset, Subset(dataset, [place for place in range(count) if place not in mine][:60])"""
WITH_REPLACEMENT = """train, batch_size=8, sampler=RandomSampler(
    train, replacement=True, num_samples=40, generator=torch.Generator().manual_seed(rank)
)"""


def split(text, evaluated="", count=240, loader="train, batch_size=8, sampler=sampler", mark=""):
    """The script by torch's loaders whose data is made by `text`, and which evaluates what `evaluated` draws."""
    evaluation = EVALUATION.format(loader=evaluated, mark=mark) if evaluated else ""
    source = SPLIT.format(count=count, split=text, loader=loader, evaluation=evaluation)
    return source.replace("in loader:  # here", "in loader:") if mark else source


SHARED = "{0}, sampler=DistributedSampler({0}, shuffle=False)"
add(
    "overlapping_batches",
    (2, 3),
    split_unseeded=split(UNSEEDED, "held"),
    split_unseeded_large=split(UNSEEDED, count=4000, loader="train, batch_size=64, sampler=sampler"),
)
OTHERS_DATA = split(MINE, "held", loader="Subset(dataset, mine), batch_size=8", mark=HERE)
add("evaluation_leak", (2, 3), evaluates_others=OTHERS_DATA)
add(
    RIGHT,
    (2, 3),
    split_seeded=split(SEEDED, SHARED.format("held")),
    evaluates_what_it_trains_on=split(SEEDED, SHARED.format("train")),
    every_sample_twice=split(TWICE.format(120, 120) + SEEDED, SHARED.format("held")),
    some_samples_twice=split(TWICE.format(230, 10) + SEEDED, SHARED.format("held")),
    with_replacement=split(SEEDED, loader=WITH_REPLACEMENT),
    padded=split(SEEDED, count=61),
)
