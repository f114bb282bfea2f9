"""Our syncs and shards in Lightning, Fabric, Accelerate and Hugging Face's Trainer train as their own DDP does."""

import contextlib
import functools
import os
import re
import sys
from collections import Counter
from importlib.util import find_spec

import psutil
import pytest
import torch
from programs import ROOT, free_port, wait_until
from torch import nn
from torch.utils.data import DataLoader
from worlds import run_ranks

from cos598d import Ledger
from cos598d.records.conventions import GRADIENTS

needs_lightning = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is missing. Run make engines")

# sync, codec, and how far its losses may be from DDP's
SYNCS = {
    "all_reduce": (None, 1e-6),
    "bucketed": (None, 1e-6),
    "ring": (None, 1e-6),
    "shared_memory": (None, 1e-6),
    "sparse_rows": ("bf16", 1e-2),
}
STEPS, PARTS = 4, 2  # optimizer steps, and micro-batches of each
SECONDS = 240


class Model(nn.Module):
    """An embedding that is large enough to send by rows, an unused layer, and statistics of each rank's own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9001, 31)
        self.statistics = nn.BatchNorm1d(31)
        self.never = nn.Linear(31, 31)
        self.output = nn.Linear(31, 3)

    def forward(self, words):
        return self.output(self.statistics(self.embedding(words).mean(1))).square().mean()


def batches(rank, number=STEPS * PARTS):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(0, 9001, (4, 5), generator=generator) for _ in range(number)]


def optimizer_of(module):
    return torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)


def strategy_class(file):
    sys.path.insert(0, str(ROOT / "examples"))
    return __import__(file).SyncStrategy


def strategies(file):
    """Yield the name and the maker of DDP's strategy and of each of ours. Each Fabric or Trainer needs a new one."""
    ours = strategy_class(file)
    yield "ddp", lambda ledger: "ddp_find_unused_parameters_true"
    for name, (codec, _) in SYNCS.items():
        options = {"compress": codec} if codec else {}
        yield name, lambda ledger, settings=options | {"sync": name}: ours(ledger=ledger, **settings)


def be_rank(comm):
    """Set the variables by which Lightning takes this process for a rank of torchrun."""
    os.environ.update(LOCAL_RANK=str(comm.rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


def calls(ledger):
    """How many calls each name of a gradient has had."""
    return Counter(row.tensor for row in ledger.rows if row.purpose == GRADIENTS)


def in_fabric(comm, folder):
    """On a rank, by strategy: losses, calls, and what a checkpoint restores."""
    be_rank(comm)
    from lightning.fabric import Fabric

    found = {}
    for name, make_strategy in strategies("fabric_strategy"):
        ledger = Ledger()
        strategy = make_strategy(ledger)
        fabric = Fabric(accelerator="cpu", devices=comm.world_size, strategy=strategy)
        fabric.launch()
        plain = Model()
        model, optimizer = fabric.setup(plain, optimizer_of(plain))
        losses = []
        with ledger:
            for index, words in enumerate(batches(comm.rank)):
                accumulates = (index + 1) % PARTS != 0
                with fabric.no_backward_sync(model, enabled=accumulates):
                    loss = model(words)
                    fabric.backward(loss)
                losses.append(loss.item())
                if not accumulates:
                    optimizer.step()
                    optimizer.zero_grad()
        found[name] = {"losses": losses}
        if name == "ddp":
            continue
        found[name]["calls"] = calls(ledger)
        path = f"{folder}/{name}.ckpt"
        fabric.save(path, {"model": model, "optimizer": optimizer, "step": STEPS})
        fabric.barrier()
        strategy.replica.settle()
        model.eval()
        found[name] |= {"names": sorted(torch.load(path)["model"]) == sorted(plain.state_dict())}
        found[name] |= {"evaluated": model(words).item()}
        again = Model()
        nn.init.zeros_(again.embedding.weight)
        again, optimizer = fabric.setup(again, optimizer_of(again))
        state = {"model": again, "optimizer": optimizer, "step": 0}
        fabric.load(path, state)
        again.eval()
        found[name] |= {"loaded": again(words).item(), "step": state["step"]}
    return found


def in_trainer(comm, folder):
    """On a rank, by strategy: losses, calls, and what a checkpoint restores."""
    be_rank(comm)
    from lightning.pytorch import LightningModule, Trainer

    class Lightning(LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses, self.validated = Model(), [], []

        def training_step(self, words, index):
            loss = self.model(words)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, words, index):
            self.validated.append(self.model(words).item())

        def configure_optimizers(self):
            return optimizer_of(self.model)

    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    settings = dict.fromkeys(quiet, False) | {"default_root_dir": folder, "num_sanity_val_steps": 0}
    new = functools.partial(Trainer, accelerator="cpu", devices=comm.world_size, **settings)
    train, seen = (DataLoader(b, batch_size=None) for b in (batches(comm.rank), batches(100 + comm.rank, 1)))
    found = {}
    for name, make_strategy in strategies("lightning_strategy"):
        ledger = Ledger()
        trainer, module = new(strategy=make_strategy(ledger), max_epochs=1, accumulate_grad_batches=PARTS), Lightning()
        with ledger:
            trainer.fit(module, train, seen)
        found[name] = {"losses": list(module.losses), "validated": list(module.validated)}
        path = f"{folder}/{name}.ckpt"
        trainer.save_checkpoint(path)
        names = sorted(torch.load(path, weights_only=True)["state_dict"])
        found[name]["names"] = names == sorted(module.state_dict())
        if name != "ddp":
            found[name]["calls"] = calls(ledger)
        resumed = Lightning()
        again = new(strategy=make_strategy(Ledger()), max_epochs=2, accumulate_grad_batches=PARTS)
        again.fit(resumed, train, seen, ckpt_path=path)
        found[name]["resumed"] = resumed.losses
        if name in ("ddp", "bucketed"):
            ledger = Ledger()
            with ledger:
                new(strategy=make_strategy(ledger), max_epochs=1, accumulate_grad_batches=PARTS).fit(module, train)
            found[name]["second fit"] = module.losses[len(train) :]
            found[name]["left nothing"] = name == "ddp" or calls(ledger) == found[name]["calls"]
    return found


def assert_near(ranks, name, key):
    """On every rank, training with `name` gave what training with DDP gave."""
    for rank in ranks:
        assert len(rank[name][key]) > 0, (name, key)
        assert rank[name][key] == pytest.approx(rank["ddp"][key], rel=SYNCS[name][1]), (name, key)


def assert_averaged_once_a_step(ranks, name):
    for rank in ranks:
        made = rank[name]["calls"]
        # More would be calls for micro-batches that only accumulate.
        assert 0 < max(made.values()) <= STEPS, name
        if name == "all_reduce":  # it has a call for each tensor, the same in each step
            used = [n for n, _ in Model().named_parameters() if not n.startswith("never")]
            assert [each.removeprefix("model.") for each in made] == used
            assert set(made.values()) == {STEPS}


# One world each, since Lightning alone takes 6 s of processor to load.


@needs_lightning
@pytest.mark.timeout(SECONDS + 60)
def test_fabric_with_our_syncs_trains_as_with_ddp(tmp_path):
    """The losses, the calls with accumulation, the names of a checkpoint, and a model that it restores."""
    ranks = run_ranks(2, in_fabric, str(tmp_path), seconds=SECONDS)
    for name in SYNCS:
        assert_near(ranks, name, "losses")
        assert_averaged_once_a_step(ranks, name)
        for rank in ranks:
            assert rank[name]["names"], name
            assert (rank[name]["loaded"], rank[name]["step"]) == (rank[name]["evaluated"], STEPS), name


@needs_lightning
@pytest.mark.timeout(SECONDS + 60)
def test_lightning_s_trainer_with_our_syncs_trains_as_with_ddp(tmp_path):
    """The same, and validation with rank 0's buffers, resumed training, and a second fit."""
    ranks = run_ranks(2, in_trainer, str(tmp_path), seconds=SECONDS)
    for name in SYNCS:
        for key in ("losses", "validated", "resumed"):
            assert_near(ranks, name, key)
        assert_averaged_once_a_step(ranks, name)
        assert all(rank[name]["names"] for rank in ranks), name
    assert_near(ranks, "bucketed", "second fit")
    assert all(rank["bucketed"]["left nothing"] for rank in ranks), "hooks of the first fit"


# Trains without end. Each rank writes its process id after a step.
ENDLESS = f"""
import os, pathlib, sys
sys.path.insert(0, {str(ROOT / "examples")!r})
from datetime import timedelta

def write(rank):
    pathlib.Path(f"{{rank}}.part").write_text(str(os.getpid()))
    os.replace(f"{{rank}}.part", f"{{rank}}.pid")

if sys.argv[1] == "fabric":
    from fabric_strategy import *
    fabric = Fabric(accelerator="cpu", devices=2, strategy=SyncStrategy(sync="ring", timeout=timedelta(seconds=300)))
    fabric.launch()
    model = fabric.setup(nn.Linear(3, 3))
    while True:
        fabric.backward(model(torch.ones(3)).sum())
        write(fabric.global_rank)
else:
    from lightning_strategy import *
    class Endless(Digits):
        def on_train_batch_end(self, *_):
            write(self.global_rank)
    strategy = SyncStrategy(sync="ring", timeout=timedelta(seconds=300))
    quiet = {{"logger": False, "enable_checkpointing": False, "use_distributed_sampler": False}}
    Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=-1, **quiet).fit(Endless(10))
"""


@needs_lightning
@pytest.mark.long(one_in=2)
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(("library", "victim"), [("fabric", 0), ("trainer", 1)])
def test_a_killed_rank_ends_the_other_long_before_the_timeout(start, tmp_path, library, victim):
    (tmp_path / "endless.py").write_text(ENDLESS)
    environ = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    program = start("endless", ["endless.py", library], environ, is_fresh=True)
    files = [tmp_path / f"{rank}.pid" for rank in range(2)]
    wait_until(lambda: program.process.poll() is not None or all(file.exists() for file in files), 150)
    assert program.process.poll() is None, program.text
    ranks = [psutil.Process(int(file.read_text())) for file in files]
    assert ranks[0].pid == program.process.pid
    ranks[victim].kill()
    try:
        assert program.wait(60) != 0
        _, still = psutil.wait_procs(ranks, 60)
        assert not still, program.text
    finally:
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()


NAMES = ["ddp", "ring", "zero1", "zero3", "shared_weights"]  # the library's own, and ours: averages and shards
# The example, the package that it needs, and whether torchrun starts its ranks.
EXAMPLES = {
    "fabric_strategy.py": ("lightning", False),
    "lightning_strategy.py": ("lightning", False),
    "accelerate_sync.py": ("accelerate", True),
    "trainer_sync.py": ("transformers", True),
}


@pytest.mark.long(one_in=4)
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("example", EXAMPLES)
def test_ten_steps_have_the_losses_of_the_library_s_ddp(example, start):
    package, by_torchrun = EXAMPLES[example]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed. Run make engines")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environ = {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    file = ROOT / "examples" / example
    port = ["--master_port", str(free_port())]
    words = ["-m", "torch.distributed.run", "--nproc_per_node", "2", *port] if by_torchrun else []
    program = start(example, [*words, file, *NAMES], environ)
    assert program.wait(SECONDS) == 0, program.text
    found = {
        name: list(map(float, said.split())) for name, said in re.findall(r"^(\w+): ([\d. ]+)$", program.text, re.M)
    }
    assert [len(found.get(name, ())) for name in NAMES] == [10] * len(NAMES), program.text
    for name in NAMES[1:]:
        assert found[name] == pytest.approx(found["ddp"], abs=2e-6), name
        assert found[name][-1] < found[name][0]
