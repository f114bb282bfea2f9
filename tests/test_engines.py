"""The engines of other libraries train as one process does on the global batch, and how Horovod is compiled."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch
from compared import Compared, adamw, sgd
from programs import ROOT
from torch import nn
from worlds import run_each

from cos598d.comm.ledger import Ledger
from cos598d.records.conventions import AGREEMENT, BUFFERS, GRADIENTS
from cos598d.strategies import class_of, get_strategy

STEPS = 4
# optimizer, micro-batches per step, norm to clip to
CASES = ((sgd, 1, 0.0), (sgd, 3, 0.05), (adamw, 3, 0.05))
# These give an unused parameter a gradient of zeros, so it decays.
DECAYS_THE_UNUSED = ("deepspeed", "horovod")
# --sync, its options, and the package that it needs
ENGINES = {
    "torch_zero1": ("torch_zero1", {}, "torch"),
    "torch_fsdp": ("torch_fsdp", {}, "torch"),
    "torch_fsdp, torch's reduce-scatter": ("torch_fsdp", {"reshard": "no", "reduce_scatter": "torch"}, "torch"),
    **{f"deepspeed {stage}": ("deepspeed", {"zero_stage": stage}, "deepspeed") for stage in range(4)},
    "horovod": ("horovod", {}, "horovod"),
    "fabric": ("fabric", {}, "lightning"),
    "fabric fsdp2": ("fabric", {"fabric_strategy": "fsdp2"}, "lightning"),
}


def skip_unless_installed(package):
    try:
        version(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed: run make engines")


class Model(nn.Module):
    """A frozen layer, an unused one, one that is used twice, layers in a list, a tied weight, a buffer."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(41, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 7)) for _ in range(3))
        self.twice = nn.Linear(7, 7)
        self.never = nn.Linear(7, 3)
        self.output = nn.Linear(7, 41)
        self.output.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(7) + 0.5)

    def forward(self, words, labels):
        state = self.twice(self.frozen(self.embedding(words).sum(1) * self.scale))
        for layer in self.layers:
            state = state + layer(state)
        logits = self.output(self.twice(state))
        return nn.functional.cross_entropy(logits, labels), logits


def a_part(step, part):
    """The `part`-th micro-batch of a step, over all ranks."""
    generator = torch.Generator().manual_seed(1000 * step + part)
    return {
        "words": torch.randint(0, 41, (8, 5), generator=generator),
        "labels": torch.randint(0, 41, (8,), generator=generator),
    }


def train(comm, case, name, options):
    """On a rank: the weights that differ from one process, and each step's losses of both. Other ranks than 0 begin
    with other weights."""
    (make, parts, clip), losses, right = case, [0.0] * STEPS, [0.0] * STEPS
    ranks, model, alone = comm.world_size, Model(comm.rank), Model(0)

    def loss_of(module, rank, step, micro):
        loss = module(**a_part(step, rank * parts + micro))[0]
        (right if module is alone else losses)[step] += loss.item() / (ranks * parts)
        return loss

    strategy = get_strategy(name)(comm, True, class_of(name).options_kind(**options), "fp32")
    both = Compared(comm, strategy, model, make, loss_of, alone)
    rate = both.optimizer.param_groups[0]["lr"]
    for step in range(STEPS):
        comm.ledger.begin(step + 1, 0.0)
        for optimizer in (strategy.optimizer, both.optimizer):
            for group in optimizer.param_groups:
                group["lr"] = rate / (step + 1)
        _, norm = both.step(step, parts, clip)
        assert not clip or norm > 2 * clip
    strategy.settle()
    assert strategy.replicas_equal
    with torch.no_grad():  # each rank calls it a different number of times
        for _ in range(comm.rank):
            model(**a_part(0, 0))
    strategy.detach()
    model(**a_part(0, 0))[0].backward()  # the caller's again, so nothing is averaged
    wrong = {}
    for (tensor, mine), (_, whole) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        assert (type(mine), mine.shape) == (nn.Parameter, whole.shape), tensor
        off = ((mine - whole).abs().max() / whole.abs().max()).item()
        if off > 1e-5:
            wrong[tensor] = off
    return wrong, losses, right


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_trains_as_one_process_does(engine):
    name, options, package = ENGINES[engine]
    skip_unless_installed(package)
    for case, by_rank in zip(CASES, run_each(2, train, CASES, name, options), strict=True):
        known = {"never.weight"} if name in DECAYS_THE_UNUSED else set()
        (wrong, mine, right), (also_wrong, others, _) = by_rank
        assert set(wrong) == set(also_wrong) == known, (case, wrong)
        assert [sum(losses) for losses in zip(mine, others)] == pytest.approx(right, rel=1e-5), case


def rows_of(comm, name):
    """On a rank: the ledger's rows of four steps of `train`: step, purpose, operation, bytes sent and received."""
    comm.ledger = Ledger()
    train(comm, CASES[1], name, {})
    rows = [row for row in comm.ledger.rows if 0 < row.iteration <= STEPS]
    return sorted((row.iteration, row.purpose, row.op, row.bytes_sent, row.bytes_received) for row in rows)


def test_the_ledger_has_the_same_rows_for_fabric_as_for_ddp():
    skip_unless_installed("lightning")
    for ddp, fabric in zip(*run_each(2, rows_of, ["ddp", "fabric"]), strict=True):
        assert {row[1] for row in ddp} >= {GRADIENTS, AGREEMENT, BUFFERS}
        assert fabric == ddp


def write_program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize(("missing", "there"), [("g++", "make"), ("make", "g++")])
def test_installing_horovod_without_a_compiler_names_the_missing_package(tmp_path, missing, there):
    write_program(tmp_path / "bin" / there, "#!/bin/sh\n")
    places = {"PATH": str(tmp_path / "bin"), "COS598D_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    tool = [sys.executable, ROOT / "scripts" / "install_horovod.py"]
    done = subprocess.run(tool, env=os.environ | places, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert f"there is no {missing} here" in done.stderr
    assert f"apt-get install {missing})" in done.stderr
    assert not (tmp_path / "cache").exists()


def test_the_compiler_wrapper_replaces_any_standard_by_c17(tmp_path):
    write_program(tmp_path / "g++", '#!/bin/sh\nfor word in "$@"; do echo "[$word]"; done\n')
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = ["-std=c++11", "-DNAME=a b", "-O3", "-std=gnu++14", "x.cc"]
    said = subprocess.run([ROOT / "scripts" / "cxx17", *words], env=environ, capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == ["[-std=c++17]", "[-DNAME=a b]", "[-O3]", "[-std=c++17]", "[x.cc]"]
