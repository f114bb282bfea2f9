"""Scripts to audit, in several styles, and audits as tests run them: every rank under `cos598d audit`.

Each script is right. `with_changes` makes others of it: right ones in another manner, and ones with a fault, in which
the comment `# here` marks the line that the audit has to name.
"""

import json
from pathlib import Path

from programs import ROOT, Program, free_port

IMPORTS = """import torch
import torch.distributed as dist
from torch import nn
"""
JOIN = """
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
"""
HEAD = IMPORTS + JOIN

BY_HAND = (
    HEAD
    + """data, labels = torch.randn(120, 8), torch.randint(0, 3, (120,))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
torch.manual_seed(100 + rank)
for p in model.parameters():
    dist.broadcast(p.data, 0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(5):
    batch = torch.arange(16 * step, 16 * step + 16)[rank::ranks]
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(data[batch]), labels[batch])
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= ranks
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
dist.destroy_process_group()
"""
)

DDP = (
    IMPORTS
    + """from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
"""
    + JOIN
    + """dataset = TensorDataset(torch.randn(48, 8), torch.randint(0, 3, (48,)))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
torch.manual_seed(100 + rank)
model = DistributedDataParallel(model)
sampler = DistributedSampler(dataset, num_replicas=ranks, rank=rank, shuffle=True)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
dist.destroy_process_group()
"""
)

SKELETON = """import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(50, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.classifier = nn.Linear(16, 2)

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.encoder(self.embeddings(input_ids))
        logits = self.classifier(hidden[:, 0])
        if labels is None:
            return (logits,)
        return nn.CrossEntropyLoss()(logits, labels), logits


def average(args, model):
    for param in model.parameters():
        if param.grad is None:
            continue
        if args.local_rank == 0:
            parts = [torch.zeros_like(param.grad) for _ in range(args.world_size)]
            dist.gather(param.grad, parts)
            mean = torch.stack(parts).mean(0)
            dist.scatter(param.grad, [mean] * args.world_size)
        else:
            dist.gather(param.grad)
            dist.scatter(param.grad)


def train(args, dataset, model):
    sampler = DistributedSampler(dataset, args.world_size, args.local_rank)
    loader = DataLoader(dataset, sampler=sampler, batch_size=args.batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, eps=1e-8)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model.zero_grad()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for step, batch in enumerate(loader):
            loss = model(input_ids=batch[0], attention_mask=batch[1], labels=batch[2])[0]
            loss = loss / args.accumulation
            loss.backward()
            if (step + 1) % args.accumulation == 0:
                average(args, model)
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                scheduler.step()
                model.zero_grad()
        evaluate(args, dataset, model)


def evaluate(args, dataset, model):
    if args.local_rank == 0:
        model.eval()
        right = 0
        for batch in DataLoader(dataset, batch_size=16):
            with torch.no_grad():
                loss, logits = model(input_ids=batch[0], attention_mask=batch[1], labels=batch[2])
            right += int((logits.argmax(1) == batch[2]).sum())
        print("accuracy", right / len(dataset))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--world_size", type=int, default=1)
    parser.add_argument("--master_ip", default="127.0.0.1")
    parser.add_argument("--master_port", default="6585")
    parser.add_argument("--max_grad_norm", type=float, default=0.2)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{args.master_ip}:{args.master_port}",
        world_size=args.world_size,
        rank=args.local_rank,
    )
    torch.manual_seed(42)
    dataset = TensorDataset(torch.randint(0, 50, (96, 12)), torch.ones(96, 12), torch.randint(0, 2, (96,)))
    model = Bert()
    torch.manual_seed(42 + args.local_rank)
    train(args, dataset, model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

_BEGIN = (
    IMPORTS
    + "{imports}"
    + JOIN
    + """data, labels = torch.randn(120, 8), torch.randint(0, 3, (120,))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
torch.manual_seed(100 + rank)
{wrap}for step in range(5):
    batch = torch.arange(16 * step, 16 * step + 16)[rank::ranks]
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(data[batch]), labels[batch])
    loss.backward()
{rest}dist.destroy_process_group()
"""
)

FSDP2 = _BEGIN.format(
    imports="""from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
""",
    wrap="""mesh = init_device_mesh("cpu", (ranks,))
fully_shard(model[2], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
""",
    rest="""    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
""",
)

FSDP1 = _BEGIN.format(
    imports="from torch.distributed.fsdp import FullyShardedDataParallel\n",
    wrap="""model[2] = FullyShardedDataParallel(model[2], device_id=torch.device("cpu"))
model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
""",
    rest="""    model.clip_grad_norm_(0.1)
    optimizer.step()
""",
)

# Only the owner of a parameter gets its average and steps it (ZeRO-2, whole tensors).
OWNERS = _BEGIN.format(
    imports="",
    wrap="""owners = {p: place % ranks for place, p in enumerate(model.parameters())}
optimizer = torch.optim.Adam([p for p in owners if owners[p] == rank], lr=0.01)
""",
    rest="""    for p, owner in owners.items():
        dist.reduce(p.grad, owner)
        p.grad /= ranks
    optimizer.step()
    for p, owner in owners.items():
        dist.broadcast(p.data, owner)
    model.zero_grad()
""",
)

# Two models and two optimizers, that step in turn.
GAN = (
    IMPORTS
    + "from torch.nn.functional import binary_cross_entropy_with_logits as entropy\n"
    + JOIN
    + """data = torch.randn(120, 8)
maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
judge = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizers = {model: torch.optim.Adam(model.parameters(), lr=0.01) for model in (maker, judge)}
torch.manual_seed(100 + rank)


def step_by(model, loss):
    model.zero_grad()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= ranks
    optimizers[model].step()


for step in range(3):
    real = data[16 * step : 16 * step + 16][rank::ranks]
    made = maker(torch.randn(8, 4))
    step_by(judge, entropy(judge(real), torch.ones(8, 1)) + entropy(judge(made.detach()), torch.zeros(8, 1)))
    step_by(maker, entropy(judge(made), torch.ones(8, 1)))
dist.destroy_process_group()
"""
)

STYLES = {
    "by_hand": BY_HAND,
    "ddp": DDP,
    "skeleton": SKELETON,
    "fsdp2": FSDP2,
    "fsdp1": FSDP1,
    "owners": OWNERS,
    "gan": GAN,
}
FLAGS = "--local_rank {rank} --world_size {world_size} --master_ip {master_ip} --master_port {master_port}"


def audit(folder, source, words="", ranks=2, flags=(), is_fresh=False, during=None):
    """Run a script, its path or its source, on so many ranks; return the exit codes, what rank 0 printed, and
    audit.json (or None). `during` is called with the programs while they run."""
    path = source if isinstance(source, Path) else folder / "train.py"
    if path is not source:
        path.write_text(source)
    port = free_port()
    programs = []
    for rank in range(ranks):
        place = {"rank": rank, "world_size": ranks, "master_ip": "127.0.0.1", "master_port": port}
        environ = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        environ |= {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        own = words.format(**place).split()
        command = ["-m", "cos598d", "audit", "--output_dir", folder / "audit", *flags, path, *own]
        programs.append(Program(folder, f"rank{rank}", [*map(str, command)], environ, is_fresh))
    if during:
        during(programs)
    codes = [program.wait() for program in programs]
    verdict = folder / "audit" / "audit.json"
    return codes, programs[0].text, json.loads(verdict.read_text()) if verdict.exists() else None


def words_of(style, more):
    """The words of a script of that style."""
    return f"{FLAGS} {more}" if style == "skeleton" else more


def with_changes(style, changes):
    """The source of a style with each (old, new) of `changes` made."""
    return changed(STYLES[style], changes)


def changed(source, changes):
    """The source with each (old, new) of `changes` made; each old text is there exactly once."""
    for old, new in changes:
        assert source.count(old) == 1, f"{old!r} is there {source.count(old)} times"
        source = source.replace(old, new)
    return source


def marked_line(source):
    """The number of the line that `# here` marks; None without one."""
    return next((number for number, line in enumerate(source.splitlines(), 1) if line.endswith("# here")), None)
